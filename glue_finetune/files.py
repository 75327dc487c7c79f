"""Make folders, and write what is in them completely or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from glue_finetune.errors import UserError
from rmm_linear.files import write_text


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file.

    Args:
        path: Where to.
        content: JSON types; a number that is not finite is an error.
    """
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def make_folder(folder: Path) -> None:
    """Make output_dir and the folders above it.

    Args:
        folder: The folder; it may exist.

    Raises:
        UserError: If it is a file or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot write output_dir {folder}: {error.strerror}. Choose another one.") from error


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
