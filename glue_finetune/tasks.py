"""The nine GLUE tasks: their metrics, the paper's settings for each, and their files, which `datasets` reads.

The official files are tab-separated text without any quoting: a quotation mark is a character like another, and "NA"
is a word. Every line is a row.
"""

from __future__ import annotations

import csv
import dataclasses
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glue_finetune.errors import UserError, one_line
from rmm_linear._support.validation import did_you_mean

if TYPE_CHECKING:
    import datasets  # takes a second, and --help needs the tasks

logger = logging.getLogger(__name__)

HUB_NAME = "nyu-mll/glue"
MAX_SCORE = 5.0  # STS-B's similarity goes from 0 to 5
_NO_UTF8 = re.compile("[\udc80-\udcff]")  # what errors="surrogateescape" makes of it


@dataclasses.dataclass(frozen=True)
class Task:
    """One GLUE task.

    Attributes:
        name: Its name on the command line and on the hub.
        folder: Name of its folder in the official layout.
        texts: Text columns of the official files, one or two.
        label: Label column of the official files.
        labels: Label values as written in the files; the position is the class. Empty for a regression.
        metrics: Official metrics, the one to report first.
        batch: Batch size of the paper.
        lr: Learning rate of the paper.
        hub_texts: Text columns on the hub where they differ from the official files.
        header: Columns of a file that has no header line; None where the first line is the header.
        dev: Name of a dev set to the stem of its file; the name is "" where there is only one.
        skip_short_rows: Skip rows that lack fields, as the hub's copy does; False makes them an error.
    """

    name: str
    folder: str
    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    batch: int
    lr: float
    hub_texts: tuple[str, ...] = ()
    header: tuple[str, ...] | None = None
    dev: tuple[tuple[str, str], ...] = (("", "dev"),)
    skip_short_rows: bool = False

    @property
    def is_regression(self) -> bool:
        """Whether the label is a score instead of a class."""
        return not self.labels

    @property
    def main_metric(self) -> str:
        """Name of the reported metric; with two dev sets that of the first one, as in "matched_accuracy"."""
        prefix = self.dev[0][0]
        return f"{prefix}_{self.metrics[0]}" if prefix else self.metrics[0]


_MATTHEWS, _ACCURACY, _F1 = ("matthews_correlation",), ("accuracy",), ("accuracy", "f1")
_CORRELATIONS = ("pearson", "spearmanr")
_PAIR, _QUESTIONS = ("sentence1", "sentence2"), ("question1", "question2")
_NLI, _NLI3, _BINARY = ("entailment", "not_entailment"), ("entailment", "neutral", "contradiction"), ("0", "1")
_MNLI_DEV = (("matched", "dev_matched"), ("mismatched", "dev_mismatched"))

# Batch and learning rate: Bershatsky et al. 2022, arXiv 2201.13195.
# fmt: off
TASKS: dict[str, Task] = {task.name: task for task in (
    #    name    folder   texts                           label           labels   metrics        batch lr
    Task("cola", "CoLA",  ("sentence",),                  "label",        _BINARY, _MATTHEWS,     16, 1e-5,
         header=("source", "label", "star", "sentence")),
    Task("mnli", "MNLI",  _PAIR,                          "gold_label",   _NLI3,   _ACCURACY,     16, 1e-5,
         hub_texts=("premise", "hypothesis"), dev=_MNLI_DEV),
    Task("mrpc", "MRPC",  ("#1 String", "#2 String"),     "Quality",      _BINARY, _F1,           16, 1e-5,
         hub_texts=_PAIR),
    Task("qnli", "QNLI",  ("question", "sentence"),       "label",        _NLI,    _ACCURACY,     16, 1e-5),
    Task("qqp",  "QQP",   _QUESTIONS,                     "is_duplicate", _BINARY, _F1,           32, 1e-5,
         skip_short_rows=True),
    Task("rte",  "RTE",   _PAIR,                          "label",        _NLI,    _ACCURACY,     16, 2e-5),
    Task("sst2", "SST-2", ("sentence",),                  "label",        _BINARY, _ACCURACY,     32, 2e-5),
    Task("stsb", "STS-B", _PAIR,                          "score",        (),      _CORRELATIONS, 16, 1e-5),
    Task("wnli", "WNLI",  _PAIR,                          "label",        _BINARY, _ACCURACY,     32, 1e-5),
)}
# fmt: on

PAPER: dict[str, Any] = {  # the same for every task in the paper
    "num_train_epochs": 10.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.98,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.1,
    "lr_scheduler_type": "polynomial",
    "warmup_steps": 0.06,  # of all steps
}
MAX_SEQ_LENGTH = 512


def get_task(name: str) -> Task:
    """Look a task up by name, in any spelling of case and dashes ("SST-2" is "sst2"); a UserError if there is none."""
    task = TASKS.get(name.lower().replace("-", "").replace("_", ""))
    if task is None:
        raise UserError(f"task_name must be one of {', '.join(TASKS)}, got {name!r}.{did_you_mean(name, TASKS)}")
    return task


def training_defaults(task: Task) -> dict[str, Any]:
    """Return the paper's settings for a task, under the names of transformers' TrainingArguments."""
    return {**PAPER, "per_device_train_batch_size": task.batch, "learning_rate": task.lr}


@dataclasses.dataclass(frozen=True)
class GlueData:
    """The parts of a task that have labels: rows with "text", for pairs also "text_pair", and "label"."""

    train: datasets.Dataset
    dev: dict[str, datasets.Dataset]  # by name, "" where there is only one


def load_task(
    task: Task, data_dir: str | None, max_train_samples: int | None = None, max_eval_samples: int | None = None
) -> GlueData:
    """Read a task's training and dev rows.

    Args:
        task: The task.
        data_dir: Folder in the official layout, with ``<folder>/train.tsv``; None reads from the hub.
        max_train_samples: Keep the first rows only; None keeps all.
        max_eval_samples: The same for every dev set.

    Returns:
        The rows.

    Raises:
        UserError: If a file is missing or malformed, if a label is not one of the task's, if the hub cannot be
            reached, or if a number of samples is not positive.
    """
    for name, value in (("max_train_samples", max_train_samples), ("max_eval_samples", max_eval_samples)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}. Leave it out to use every row.")
    data = _load_hub(task) if data_dir is None else _load_folder(task, Path(data_dir).expanduser())
    return GlueData(
        _first(data.train, max_train_samples),
        {name: _first(rows, max_eval_samples) for name, rows in data.dev.items()},
    )


def _first(rows: datasets.Dataset, count: int | None) -> datasets.Dataset:
    return rows if count is None or count >= len(rows) else rows.select(range(count))


def _load_folder(task: Task, root: Path) -> GlueData:
    folder = root / task.folder
    if not folder.is_dir():
        raise UserError(
            f"data_dir must hold a folder {task.folder!r} with train.tsv and {task.dev[0][1]}.tsv; "
            f"there is no {folder}."
        )
    return GlueData(
        read_file(task, folder / "train.tsv"),
        {name: read_file(task, folder / f"{stem}.tsv") for name, stem in task.dev},
    )


def _load_hub(task: Task) -> GlueData:
    import datasets

    logger.info("Reading %s, %s, from the hub.", HUB_NAME, task.name)
    # OSError covers the hub's HTTP errors; datasets reports a hub it cannot see as a file that is not found.
    try:
        hub = datasets.load_dataset(HUB_NAME, task.name)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"Cannot read {HUB_NAME} from the hub ({one_line(error)}). "
            "Without a connection give --data_dir, a folder with the official GLUE files."
        ) from error
    texts = task.hub_texts or task.texts
    renamed: dict[str, str] = dict(zip(texts, ("text", "text_pair"), strict=False))

    def prepare(split: str) -> datasets.Dataset:
        return hub[split].select_columns([*texts, "label"]).rename_columns(renamed)

    return GlueData(
        prepare("train"), {name: prepare(f"validation_{name}" if name else "validation") for name, _ in task.dev}
    )


def read_file(task: Task, path: Path) -> datasets.Dataset:
    """Read one official file; a UserError if it is missing, empty or malformed, or if a label is none of the task's.

    Rows of QQP that lack fields are skipped and counted, as in the hub's copy; elsewhere they are an error.

    Returns:
        Rows as in :class:`GlueData`; the label is a class number, or a score for a regression.
    """
    import datasets

    skipped = _check_lines(task, path)
    columns: dict[str, list[str]] = {name: [] for name in (*task.texts, task.label)}
    features = datasets.Features(dict.fromkeys(columns, datasets.Value("string")))
    stream = datasets.load_dataset(
        "csv", data_files=str(path), split="train", streaming=True,  # or it would be written into a cache
        sep="\t", quoting=csv.QUOTE_NONE, keep_default_na=False, skip_blank_lines=False, skiprows=skipped,
        names=task.header and [*task.header], features=features,
    )  # fmt: skip
    for batch in stream.iter(batch_size=10_000):
        for name, values in columns.items():
            values.extend(batch[name])
    labels = [_read_label(task, text) for text in columns.pop(task.label)]
    return datasets.Dataset.from_dict(
        {**dict(zip(("text", "text_pair"), columns.values(), strict=False)), "label": labels}
    )


def _read_label(task: Task, text: str) -> float | None:
    """The class number, or the score; None for what is no label of the task."""
    if not task.is_regression:
        return task.labels.index(text) if text in task.labels else None
    try:
        return score if 0 <= (score := float(text)) <= MAX_SCORE else None
    except ValueError:
        return None


def _check_lines(task: Task, path: Path) -> list[int]:
    """Raise a UserError for the first line that is wrong; return the places of those to skip, the first being 0."""
    names, rows, skipped = task.header, 0, []
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
            for place, line in enumerate(file):
                fields = tuple(line.rstrip("\n").split("\t"))
                if names is not None and len(fields) < len(names) and task.skip_short_rows:
                    skipped.append(place)
                elif wrong := _find_wrong(task, names, line, fields):
                    raise UserError(f"{path}:{place + 1}: {wrong}")
                else:
                    rows += names is not None
                    names = names or fields
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}. --data_dir must be in the official layout.") from error
    if not rows:
        raise UserError(f"{path}: the file must hold at least one row, got none. Use the official file.")
    if skipped:
        logger.warning("%s: skipped %d rows that lack fields.", path, len(skipped))
    return skipped


def _find_wrong(task: Task, names: Sequence[str] | None, line: str, fields: Sequence[str]) -> str | None:
    wanted = (*task.texts, task.label)
    if byte := _NO_UTF8.search(line):
        code, column = ord(byte[0]) - 0xDC00, byte.start() + 1
        return f"the text must be UTF-8, got byte 0x{code:02x} at column {column}. Convert the file with iconv."
    if names is None:
        missing = ", ".join(name for name in wanted if name not in fields)
        rule = f"the header must name the columns {', '.join(wanted)}"
        return f"{rule}; {missing} not found in {', '.join(fields)!r}. Use the official file." if missing else None
    if len(fields) != len(names):
        rule = f"a row must have {len(names)} tab-separated fields ({', '.join(names)})"
        return f"{rule}, got {len(fields)}. Use the official file, or remove the line."
    label = fields[names.index(task.label)]
    rule = f"one of {', '.join(task.labels)}" if task.labels else f"a number from 0 to {MAX_SCORE:g}"
    is_wrong = _read_label(task, label) is None
    return f"{task.label} must be {rule}, got {label!r}. Correct the line." if is_wrong else None
