"""Read GLUE: the official files from a folder, or the hub's copy through `datasets`.

The official files are tab-separated text without any quoting: a quotation mark is a character like another, and "NA"
is a word. They are therefore split here, line by line, which is also what gives an error its line number.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import datasets

from glue_finetune.errors import UserError, one_line
from glue_finetune.tasks import Task

logger = logging.getLogger(__name__)

HUB_NAME = "nyu-mll/glue"
MAX_SCORE = 5.0  # STS-B's similarity goes from 0 to 5


@dataclasses.dataclass(frozen=True)
class GlueData:
    """The two parts of a task that have labels.

    Attributes:
        train: Rows with "text", for pairs also "text_pair", and "label".
        dev: Name of the dev set ("" where there is only one) to its rows.
    """

    train: datasets.Dataset
    dev: dict[str, datasets.Dataset]


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
        Rows with "text", for pairs also "text_pair", and "label" (class number, or score for a regression).

    Raises:
        UserError: If the file is missing, empty or malformed, or if a label is not one of the task's.
    """
    columns: dict[str, list] = {name: [] for name in ("text", "text_pair")[: len(task.texts)]}
    labels: list[int | float] = []
    names = task.header or ()
    places = _find_columns(task, names, path) if names else []
    skipped = 0
    for number, fields in _split_lines(path):
        if not names:
            names = tuple(fields)
            places = _find_columns(task, names, path)
            continue
        if len(fields) != len(names):
            if task.skip_short_rows and len(fields) < len(names):
                skipped += 1
                continue
            raise UserError(
                f"{path}:{number}: a row must have {len(names)} tab-separated fields ({', '.join(names)}), "
                f"got {len(fields)}. Use the official file, or remove the line."
            )
        *texts, label = (fields[place] for place in places)
        for column, text in zip(columns.values(), texts, strict=True):
            column.append(text)
        labels.append(_parse_label(task, label, path, number))
    if skipped:
        logger.warning("%s: skipped %d rows that lack fields.", path, skipped)
    if not labels:
        raise UserError(f"{path}: the file must hold at least one row, got none. Use the official file.")
    return datasets.Dataset.from_dict({**columns, "label": labels})


def _split_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{path}:{number}: the text must be UTF-8, got byte 0x{line[error.start]:02x} "
                        f"at column {error.start + 1}. Convert the file with iconv."
                    ) from None
                yield number, text.rstrip("\r\n").split("\t")
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}. --data_dir must be in the official layout.") from error


def _find_columns(task: Task, names: tuple[str, ...], path: Path) -> list[int]:
    wanted = (*task.texts, task.label)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise UserError(
            f"{path}:1: the header must name the columns {', '.join(wanted)}; {', '.join(missing)} not found in "
            f"{', '.join(names)!r}. Use the official file."
        )
    return [names.index(name) for name in wanted]


def _parse_label(task: Task, text: str, path: Path, number: int) -> int | float:
    if not task.is_regression:
        if text in task.labels:
            return task.labels.index(text)
        raise UserError(
            f"{path}:{number}: {task.label} must be one of {', '.join(task.labels)}, got {text!r}. Correct the line."
        )
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not 0.0 <= score <= MAX_SCORE:
        raise UserError(
            f"{path}:{number}: {task.label} must be a number from 0 to {MAX_SCORE:g}, got {text!r}. Correct the line."
        )
    return score
