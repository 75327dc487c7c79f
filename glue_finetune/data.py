"""Read GLUE: the official files from a folder, or the hub's copy, both through `datasets`.

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

import datasets

from glue_finetune.errors import UserError, one_line
from glue_finetune.tasks import Task

logger = logging.getLogger(__name__)

HUB_NAME = "nyu-mll/glue"
MAX_SCORE = 5.0  # STS-B's similarity goes from 0 to 5
_TEXT = datasets.Value("string")
_NO_UTF8 = re.compile("[\udc80-\udcff]")  # what errors="surrogateescape" makes of it


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
    """Read one official file.

    Rows of QQP that lack fields are skipped and counted, as in the hub's copy; elsewhere they are an error.

    Args:
        task: The task the file belongs to.
        path: The file.

    Returns:
        Rows as in :class:`GlueData`; the label is a class number, or a score for a regression.

    Raises:
        UserError: If the file is missing, empty or malformed, or if a label is not one of the task's.
    """
    skipped = _check_lines(task, path)
    columns: dict[str, list[str]] = {name: [] for name in (*task.texts, task.label)}
    stream = datasets.load_dataset(
        "csv", data_files=str(path), split="train", streaming=True,  # or it would be written into a cache
        sep="\t", quoting=csv.QUOTE_NONE, keep_default_na=False, skip_blank_lines=False, skiprows=skipped,
        names=task.header and [*task.header], features=datasets.Features(dict.fromkeys(columns, _TEXT)),
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
