"""output_dir: when a run may use it, which checkpoint it resumes from, and files written whole or not at all.

A checkpoint is complete if it has the file that is written last and removed first.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from glue_finetune.arguments import GlueTrainingArguments, differences
from glue_finetune.errors import UserError, one_line
from rmm_linear._support.files import digest, write_text
from rmm_linear._support.json_files import read_json, shortened

RESULTS_FILE, VARIANCE_FILE = "results.json", "variance.csv"
SETTINGS_FILE = "glue_settings.json"
LOCK = ".lock"  # in output_dir while a run writes there, and after one was killed
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def choose_checkpoint(training: GlueTrainingArguments, settings: dict[str, Any]) -> Path | None:
    """Apply the rules for output_dir, reading only.

    Args:
        training: The Trainer's arguments.
        settings: What determines the outcome of the run.

    Returns:
        The checkpoint to go on from; None to start from scratch.

    Raises:
        UserError: If output_dir is not empty though the run neither resumes nor overwrites, or if it should resume
            and there is nothing to resume from, or that belongs to a run with other settings.
    """
    folder, wanted = Path(training.output_dir or ""), training.resume_from_checkpoint
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir must be a folder, got the file {folder}. Choose another one.")
    if not wanted or str(wanted).lower() == "false":
        if not training.overwrite_output_dir and has_files(folder):
            raise UserError(
                f"output_dir must be empty, got {folder} with files in it. Choose another one, go on with "
                "--resume_from_checkpoint last, or start from scratch with --overwrite_output_dir."
            )
        return None
    if str(wanted).lower() in ("true", "last"):
        checkpoints = complete_checkpoints(folder)
        if not checkpoints:
            raise UserError(f"resume_from_checkpoint needs a checkpoint, {folder} has none. Leave the flag out.")
        checkpoint = checkpoints[-1]
    else:
        checkpoint = Path(str(wanted)).expanduser()
        if not (checkpoint / SETTINGS_FILE).is_file():
            raise UserError(
                f"resume_from_checkpoint must be a checkpoint of this script; {checkpoint} has no {SETTINGS_FILE}."
            )
    if checkpoint.parent.resolve() == folder.resolve() and (folder / RESULTS_FILE).exists():
        raise UserError(
            f"The run in {folder} is finished, see {RESULTS_FILE}. Start from scratch with --overwrite_output_dir."
        )
    if changes := differences(read_settings(checkpoint), settings):
        raise UserError(f"A resumed run must have the settings it began with; {changes}. Choose another output_dir.")
    return checkpoint


def prepare_folder(training: GlueTrainingArguments, resuming: bool) -> Path:
    """Make output_dir and return it; a UserError if it cannot be written."""
    # Removed is what a killed process left incomplete; when overwriting, an earlier run's checkpoints and results, and
    # nothing else. Of several processes, the first one removes.
    folder = Path(training.output_dir or "")
    make_folder(folder)
    try:
        if training.process_index == 0 and (resuming or training.overwrite_output_dir):
            kept = complete_checkpoints(folder) if resuming else []
            if not resuming:
                for name in (RESULTS_FILE, VARIANCE_FILE):
                    (folder / name).unlink(missing_ok=True)
            for path in folder.iterdir():
                if path.is_dir() and _CHECKPOINT.fullmatch(path.name) and path not in kept:
                    remove_checkpoint(path)
    except OSError as error:
        raise UserError(f"Cannot write output_dir {folder}: {error.strerror}. Choose another one.") from error
    return folder


def mark_complete(checkpoint: Path, settings: dict[str, Any]) -> None:
    """Write what makes a checkpoint complete: the run's settings, and a digest of every other file in the folder."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != SETTINGS_FILE)
    digests = {path.relative_to(checkpoint).as_posix(): digest(path) for path in files}
    write_json(checkpoint / SETTINGS_FILE, {"settings": settings, "sha256": digests})


def complete_checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints in a run's output_dir, in the order of their steps."""
    steps = {path: _CHECKPOINT.fullmatch(path.name) for path in folder.glob("checkpoint-*")}
    found = {path: int(match[1]) for path, match in steps.items() if match and (path / SETTINGS_FILE).is_file()}
    return sorted(found, key=lambda path: found[path])


def read_settings(checkpoint: Path) -> dict[str, Any]:
    """Return what determined the outcome of a complete checkpoint's run; a UserError if the file is damaged."""
    return _read_marker(checkpoint)["settings"]


def check_files(checkpoint: Path) -> None:
    """Compare all files of a complete checkpoint with what was written; a UserError if one is missing or damaged."""
    for name, expected in _read_marker(checkpoint)["sha256"].items():
        path = checkpoint / name
        try:
            found = digest(path) if path.is_file() else None
        except OSError as error:
            raise _damaged(path, error.strerror or one_line(error)) from error
        if found is None or found != expected:
            raise _damaged(path, "it is no file" if found is None else "it is not as it was written")


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint; one that is half removed does not count as complete."""
    (checkpoint / SETTINGS_FILE).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def _read_marker(checkpoint: Path) -> dict[str, dict[str, Any]]:
    path = checkpoint / SETTINGS_FILE
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise _damaged(path, (isinstance(error, OSError) and error.strerror) or one_line(error)) from error
    if not (isinstance(content, dict) and all(isinstance(content.get(k), dict) for k in ("settings", "sha256"))):
        raise _damaged(path, "it has no settings and digests")
    for name in content["sha256"]:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise _damaged(path, f"it names {name!r}, which is not in the checkpoint")
    return content


def _damaged(path: Path, said: str) -> UserError:
    return UserError(
        f"{shortened(str(path))} is damaged ({shortened(said)}). Remove this checkpoint to go on from an earlier one, "
        "or start from scratch with --overwrite_output_dir."
    )


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file; a number that is not finite is an error."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def has_files(folder: Path) -> bool:
    """Return whether a folder exists and holds anything but a lock."""
    return folder.is_dir() and any(path.name != LOCK for path in folder.iterdir())


def make_folder(folder: Path) -> None:
    """Make output_dir and the folders above it; a UserError if it is a file or cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot write output_dir {folder}: {error.strerror}. Choose another one.") from error


@contextmanager
def saving(
    what: Path, remedy: str = "go on with --resume_from_checkpoint last, if there is a checkpoint"
) -> Iterator[None]:
    """Turn what goes wrong while something is saved, as on a full disk, into one clear line.

    Args:
        what: The file or folder.
        remedy: What to do when there is room again.

    Raises:
        UserError: If the block cannot write.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # Python's own, torch.save's, safetensors'
        raise UserError(
            f"Cannot save {what}: {one_line(error)}. What was saved before is complete. Make room, then {remedy}."
        ) from error


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make output_dir, and keep other runs out of it until the block, or the process, ends.

    Args:
        folder: The folder; it may exist.

    Raises:
        UserError: If it cannot be made, or another run is writing into it.
    """
    make_folder(folder)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise UserError(f"Another run is writing into output_dir {folder}. Choose another one, or wait.") from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):  # while it is held, so that it is no other run's; Windows keeps it
                (folder / LOCK).unlink()
            lock.release()


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Write a folder that is there completely or not at all.

    Args:
        folder: Where to; it must not exist.

    Yields:
        The folder to write into. It gets its name when the block ends, and is removed if the block raises.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    try:
        yield partial
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
