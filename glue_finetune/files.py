"""Make folders, and write what is in them completely or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from glue_finetune.errors import UserError, one_line
from rmm_linear._support.files import write_text

LOCK = ".lock"  # in output_dir while a run writes there, and after one was killed


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
            with suppress(OSError):  # while it is held, so that it is nobody else's; Windows keeps it
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
