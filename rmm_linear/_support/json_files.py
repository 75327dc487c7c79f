"""Read JSON files that others may have written: of a size that can be read, without a key twice; errors name them."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 25  # the state of 20,000 converted layers takes a third of it
_SHOWN = 1000  # characters of an error


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file; raise ValueError if it is malformed, has a key twice, is too large, or is no file at all."""
    found = Path(path).stat()
    if not stat.S_ISREG(found.st_mode):  # a pipe would wait forever
        raise ValueError("it is no regular file")
    if found.st_size > MOST_BYTES:
        raise ValueError(f"it has {found.st_size} bytes, more than the {MOST_BYTES} that are read")
    with open(path, "rb") as file:
        text = file.read(MOST_BYTES)
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


@contextmanager
def naming_file(path: str | os.PathLike[str], what: str = "", remedy: str = "") -> Iterator[None]:
    """Turn errors in the content of a file into a short ValueError that begins with its path and ``what``."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        said = str(error) if isinstance(error, ValueError | TypeError) else repr(error)
        raise ValueError(f"{os.fspath(path)}{what}: {shortened(said)}{remedy}") from error


def shortened(text: str) -> str:
    """Return a text without its middle, if it is long."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it has the key {name!r} twice")
        found[name] = value
    return found
