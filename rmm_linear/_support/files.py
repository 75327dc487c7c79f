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

    Args:
        path: The file to write.

    Yields:
        The temporary file, in the same folder and with the same suffix.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file atomically: after a failure, the old file or none is there.

    Args:
        path: File to write.
        text: Its content.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def digest(path: str | os.PathLike[str]) -> str:
    """Compute the SHA-256 digest of a file.

    Args:
        path: File to read.

    Returns:
        Its 64 hexadecimal digits.
    """
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()
