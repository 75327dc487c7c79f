"""Write files atomically, and their digests."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary file that replaces ``path`` at the end of the block, and is removed if the block raises.

    Folders that are not there are made.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"The path must be that of a file, got the folder {path}. Add the file's name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        temporary.unlink(missing_ok=True)  # a link that came with the folder would lead out of it
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file atomically: after a failure, the old file or none is there."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def digest(path: str | os.PathLike[str]) -> str:
    """Compute the SHA-256 digest of a file."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()
