"""Write files completely or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary file that takes another's place when the block ends, and disappears if it fails.

    Args:
        path: The file that is wanted.

    Yields:
        The temporary file, in the same folder and with the same suffix.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # mkstemp lets nobody else read it
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file.

    Args:
        path: Where to.
        text: Its content.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file.

    Args:
        path: Where to.
        content: JSON types; a number that is not finite is an error.
    """
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
