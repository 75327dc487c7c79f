"""Save a JSON file and the tensors that belong to it, atomically as a pair.

The tensors are in a safetensors file next to the JSON file, with their digest in its name, so a new save never
overwrites the tensors that the JSON file on disk refers to. Replacing the JSON file, which is atomic, makes the new
save the current one; the old tensors are removed last. If the process is killed or the disk is full at any point,
either the old or the new save is complete.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from rmm_linear._support.files import digest, replacing
from rmm_linear._support.installing import INSTALL_EXTRA

_DIGEST = "tensors_sha256"
_SUFFIX = ".safetensors"
_SHOWN = 16  # digits of the digest in the name


@contextmanager
def tensors_beside(path: Path, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, str]]:
    """Write tensors next to a JSON file, which the caller replaces inside the block, with the yielded entries."""
    named: dict[str, str] = {}
    staged, beside, is_new = path.with_name(path.name + _SUFFIX), None, False
    try:
        if tensors:
            with replacing(staged) as temporary:
                _safetensors().save_file({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, temporary)
                named[_DIGEST] = digest(temporary)
            beside = _beside(path, named[_DIGEST])
            is_new = not beside.exists()
            staged.replace(beside)
        yield named
    except BaseException:
        staged.unlink(missing_ok=True)
        if beside is not None and is_new:
            beside.unlink(missing_ok=True)
        raise
    for earlier in _tensor_files(path):
        if earlier != beside:
            with contextlib.suppress(OSError):  # this save is complete; the next one tries again
                earlier.unlink()


def remove_with_tensors(path: Path) -> None:
    for found in _tensor_files(path):
        found.unlink(missing_ok=True)
    path.unlink(missing_ok=True)  # last: while it exists, the removal can be repeated


def read_tensors(path: Path, content: Any) -> dict[str, Tensor] | None:
    """Read the tensors that :func:`tensors_beside` wrote; None if it was saved without."""
    if not isinstance(content, dict) or _DIGEST not in content:
        return None
    expected = str(content[_DIGEST])
    if not re.fullmatch("[0-9a-f]{64}", expected):  # it becomes part of a file's name
        raise ValueError(f"{_DIGEST} must be a SHA-256 digest, got {expected!r}.")
    beside = _beside(path, expected)
    if not beside.is_file() or digest(beside) != expected:
        raise ValueError(f"{beside.name} must lie next to it as it was written, and is missing or another file.")
    try:
        return _safetensors().load_file(beside)
    except Exception as error:  # safetensors' own is no ValueError
        raise ValueError(f"{beside.name} must be a safetensors file, got another: {error}") from error


def _tensor_files(path: Path) -> list[Path]:
    """Return the tensors' files of all saves at this path, interrupted ones included."""
    name = re.compile(rf"{re.escape(path.name)}(\.[0-9a-f]{{{_SHOWN}}})?{re.escape(_SUFFIX)}")
    return [found for found in path.parent.iterdir() if name.fullmatch(found.name)]


def _beside(path: Path, sha256: str) -> Path:
    return path.with_name(f"{path.name}.{sha256[:_SHOWN]}{_SUFFIX}")  # of model.json, never model.safetensors


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as missing:
        raise ImportError(
            f"The state of norm estimators is saved with safetensors, which is not installed. Run {INSTALL_EXTRA}."
        ) from missing
    return safetensors.torch
