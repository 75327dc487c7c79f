"""Which checkpoints are complete: those that have the file that is written last and removed first."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from glue_finetune.errors import UserError, one_line
from glue_finetune.files import write_json
from rmm_linear._support.files import digest

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
SETTINGS_FILE = "glue_settings.json"


def mark_complete(checkpoint: Path, settings: dict[str, Any]) -> None:
    """Write what makes a checkpoint complete: the run's settings, and a digest of every other file in the folder."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != SETTINGS_FILE)
    digests = {path.relative_to(checkpoint).as_posix(): digest(path) for path in files}
    write_json(checkpoint / SETTINGS_FILE, {"settings": settings, "sha256": digests})


def complete_checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints in a run's output_dir, in the order of their steps."""
    steps = {path: CHECKPOINT.fullmatch(path.name) for path in folder.glob("checkpoint-*")}
    found = {path: int(match[1]) for path, match in steps.items() if match and (path / SETTINGS_FILE).is_file()}
    return sorted(found, key=lambda path: found[path])


def read_settings(checkpoint: Path) -> dict[str, Any]:
    """Return what determined the outcome of a complete checkpoint's run; a UserError if the file is damaged."""
    return _read_marker(checkpoint)["settings"]


def check_files(checkpoint: Path) -> None:
    """Compare all files of a complete checkpoint with what was written; a UserError if one is missing or damaged."""
    for name, expected in _read_marker(checkpoint)["sha256"].items():
        try:
            found = digest(checkpoint / name)
        except OSError as error:
            raise _damaged(checkpoint / name, error.strerror or one_line(error)) from error
        if found != expected:
            raise _damaged(checkpoint / name, "it is not as it was written")


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint; one that is half removed does not count as complete."""
    (checkpoint / SETTINGS_FILE).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def _read_marker(checkpoint: Path) -> dict[str, dict[str, Any]]:
    path = checkpoint / SETTINGS_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise _damaged(path, (isinstance(error, OSError) and error.strerror) or one_line(error)) from error
    if not (isinstance(content, dict) and all(isinstance(content.get(k), dict) for k in ("settings", "sha256"))):
        raise _damaged(path, "it has no settings and digests")
    return content


def _damaged(path: Path, said: str) -> UserError:
    return UserError(
        f"{path} is damaged ({said}). Remove this checkpoint to go on from an earlier one, or start anew with "
        "--overwrite_output_dir."
    )
