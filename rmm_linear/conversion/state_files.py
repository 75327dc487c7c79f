"""A JSON file and the tensors that belong to it, saved so that there are always both of one save.

Tensors lie beside the JSON file, in a safetensors file whose name has their digest. So nothing is written over that the
JSON file on disk needs; replacing that one, which is atomic, is what makes a save the current one. Wherever a process
is killed or a disk is full, the old save or the new one is there as a whole. Tensors of the old one are removed last.
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

_DIGEST = "tensors_sha256"
_SUFFIX = ".safetensors"
_SHOWN = 16  # digits of the digest in the name


@contextmanager
def tensors_beside(path: Path, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, str]]:
    """Write tensors beside a JSON file that is to be replaced in the block.

    Args:
        path: The JSON file.
        tensors: What belongs to it; there may be none.

    Yields:
        What the JSON file must have, so that :func:`read_tensors` finds them.
    """
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
    """Remove a JSON file and the tensors that belong to it.

    Args:
        path: The JSON file; it may be gone already.
    """
    for found in _tensor_files(path):
        found.unlink(missing_ok=True)
    path.unlink(missing_ok=True)  # last: who sees it may try again


def read_tensors(path: Path, content: Any) -> dict[str, Tensor] | None:
    """Read the tensors that :func:`tensors_beside` wrote.

    Args:
        path: The JSON file.
        content: What was read from it.

    Returns:
        The tensors; None if there were none.

    Raises:
        ValueError: If their file is missing or another one.
    """
    if not isinstance(content, dict) or _DIGEST not in content:
        return None
    expected = str(content[_DIGEST])
    if not re.fullmatch("[0-9a-f]{64}", expected):  # it becomes part of a file's name
        raise ValueError(f"{_DIGEST} must be a SHA-256 digest, got {expected!r}.")
    beside = _beside(path, expected)
    if not beside.is_file() or digest(beside) != expected:
        raise ValueError(f"{beside.name} must lie beside it as it was written, and is missing or another one.")
    return _safetensors().load_file(beside)


def _tensor_files(path: Path) -> list[Path]:
    """Of any save under this name, also of one that was killed."""
    name = re.compile(rf"{re.escape(path.name)}(\.[0-9a-f]{{{_SHOWN}}})?{re.escape(_SUFFIX)}")
    return [found for found in path.parent.iterdir() if name.fullmatch(found.name)]


def _beside(path: Path, sha256: str) -> Path:
    return path.with_name(f"{path.name}.{sha256[:_SHOWN]}{_SUFFIX}")  # of model.json, never model.safetensors


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as missing:
        raise ImportError(
            "The state of norm estimators is saved with safetensors, which is not installed. "
            "Run pip install 'rmm_linear[glue]'."
        ) from missing
    return safetensors.torch
