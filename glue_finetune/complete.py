"""Which checkpoints are complete: those that have the file that is written last and removed first."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from glue_finetune.errors import UserError, one_line
from glue_finetune.files import write_json
from rmm_linear._support.files import digest

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
SETTINGS_FILE = "glue_settings.json"


def mark_complete(checkpoint: Path, settings: dict[str, Any]) -> None:
    """Write what makes a checkpoint complete: the run's settings, and a digest of every file.

    Args:
        checkpoint: The folder, with all other files in it.
        settings: What determines the outcome of the run.
    """
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != SETTINGS_FILE)
    digests = {path.relative_to(checkpoint).as_posix(): digest(path) for path in files}
    write_json(checkpoint / SETTINGS_FILE, {"settings": settings, "sha256": digests})


def complete_checkpoints(folder: Path) -> list[Path]:
    """List a run's complete checkpoints.

    Args:
        folder: The run's output_dir.

    Returns:
        The checkpoints in the order of their steps.
    """
    steps = {path: CHECKPOINT.fullmatch(path.name) for path in folder.glob("checkpoint-*")}
    found = {path: int(match[1]) for path, match in steps.items() if match and (path / SETTINGS_FILE).is_file()}
    return sorted(found, key=lambda path: found[path])


def read_settings(checkpoint: Path) -> dict[str, Any]:
    """Read the settings of a complete checkpoint.

    Args:
        checkpoint: The folder.

    Returns:
        What determined the outcome of its run.

    Raises:
        UserError: If the file is missing or damaged.
    """
    return _read_marker(checkpoint)["settings"]


def check_files(checkpoint: Path) -> None:
    """Compare all files of a complete checkpoint with what was written.

    Args:
        checkpoint: The folder.

    Raises:
        UserError: If one is missing or damaged.
    """
    for name, expected in _read_marker(checkpoint)["sha256"].items():
        with _reading(checkpoint / name):
            found = digest(checkpoint / name)
        if found != expected:
            raise UserError(_damaged(checkpoint / name, "it is not as it was written"))


def _read_marker(checkpoint: Path) -> dict[str, dict[str, Any]]:
    path = checkpoint / SETTINGS_FILE
    with _reading(path):
        content = json.loads(path.read_text(encoding="utf-8"))
    if not (isinstance(content, dict) and all(isinstance(content.get(k), dict) for k in ("settings", "sha256"))):
        raise UserError(_damaged(path, "it has no settings and digests"))
    return content


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RecursionError, ValueError) as error:
        said = (isinstance(error, OSError) and error.strerror) or one_line(error)
        raise UserError(_damaged(path, said)) from error


def _damaged(path: Path, said: str) -> str:
    return (
        f"{path} is damaged ({said}). Remove this checkpoint to go on from an earlier one, or start anew with "
        "--overwrite_output_dir."
    )


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint; one that is half removed does not count as complete.

    Args:
        checkpoint: The folder.
    """
    (checkpoint / SETTINGS_FILE).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)
