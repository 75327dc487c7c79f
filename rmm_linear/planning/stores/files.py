"""States as safetensors files in a folder: one file per state, with a digest that is checked when it comes back.

The format is a length (8 bytes, little-endian), that many bytes of JSON, and the tensors' bytes one after another, so
it is written here directly: from the tensors' own memory, without the interpreter's lock, and with the system's own
word for what went wrong. https://huggingface.co/docs/safetensors has the format.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rmm_linear.planning.stores.base import StoreError
from rmm_linear.planning.stores.folder import RunFolder

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_LONGEST_HEADER = 1 << 24  # bytes; a damaged length must not ask for more memory than there is
_MOST_DIMENSIONS = 64


class FileStore:
    """A store in a folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = RunFolder(Path(folder))

    def path(self, key: str) -> Path:
        return self._folder.path / f"{key}.safetensors"

    def put(self, key: str, tensors: list[Tensor]) -> None:
        """Write a file under another name, and give it its own when it is complete."""
        path = self.path(key)
        temporary = path.with_suffix(".part")
        try:
            with open(temporary, "wb", buffering=0) as file:
                for part in [_header(key, tensors), *map(_bytes_of, tensors)]:
                    _write(file, part)
            temporary.replace(path)
        except BaseException as error:  # an interrupt too leaves nothing half written
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if not isinstance(error, OSError):
                raise
            reason = error.strerror or str(error)
            raise StoreError(f"{path} cannot be written: {reason}. Make room there, or give another folder.") from error

    def get(self, key: str) -> list[Tensor]:
        return self.read(key, None)

    def read(self, key: str, into: list[Tensor] | None) -> list[Tensor]:
        """As :meth:`get`, into tensors on the CPU of the same dtypes and shapes, if there are some."""
        path = self.path(key)
        try:
            with open(path, "rb", buffering=0) as file:
                header = _read_header(file)
                entries = _entries(header)
                if into is not None and entries != [(each.dtype, [*each.shape]) for each in into]:
                    raise ValueError("its tensors are others")
                tensors = [_made(file, entry) for entry in entries] if into is None else into
                for tensor in tensors:
                    _fill(file, tensor)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror or error}. {_LEAVE_ALONE}") from error
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, EOFError) as error:
            raise StoreError(f"{path} is damaged: {error!r}. {_LEAVE_ALONE}") from error
        if header["__metadata__"].get("sha256") != _digest(key, tensors):
            raise StoreError(f"{path} is damaged: its digest is another. {_LEAVE_ALONE}")
        return tensors

    def drop(self, key: str) -> None:
        self.path(key).unlink(missing_ok=True)

    def close(self) -> None:
        self._folder.remove()


_LEAVE_ALONE = "Leave the folder alone until the backward pass has ended, and run the forward pass again."


def _header(key: str, tensors: list[Tensor]) -> bytes:
    entries, begin = {}, 0
    for number, tensor in enumerate(tensors):
        end = begin + tensor.numel() * tensor.element_size()
        # A dtype without a name in the format is written as bytes.
        shape = [*tensor.shape] if tensor.dtype in _NAMES else [end - begin]
        name = _NAMES.get(tensor.dtype, "U8")
        entries[f"{number:04d}"] = {"dtype": name, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    metadata = {"sha256": _digest(key, tensors), "layout": json.dumps([_layout(tensor) for tensor in tensors])}
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _layout(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), [*tensor.shape]]


def _digest(key: str, tensors: list[Tensor]) -> str:
    found = hashlib.sha256(json.dumps([key, [_layout(tensor) for tensor in tensors]]).encode())
    for tensor in tensors:
        found.update(_bytes_of(tensor))
    return found.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    found: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(found)


def _write(file: Any, part: bytes | memoryview) -> None:
    rest = memoryview(part)
    while rest.nbytes:  # one call writes 2 GB at most
        rest = rest[file.write(rest) :]


def _read_header(file: Any) -> dict[str, Any]:
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= _LONGEST_HEADER:
        raise ValueError(f"its header has {length} bytes")
    return json.loads(file.read(length))


def _entries(header: dict[str, Any]) -> list[tuple[torch.dtype, list[int]]]:
    entries: Any = [(vars(torch).get(dtype), shape) for dtype, shape in json.loads(header["__metadata__"]["layout"])]
    if not all(isinstance(dtype, torch.dtype) and len(shape) <= _MOST_DIMENSIONS for dtype, shape in entries):
        raise ValueError("its layout is not one of tensors")
    return entries


def _made(file: Any, entry: tuple[torch.dtype, list[int]]) -> Tensor:
    dtype, shape = entry
    if prod(shape) * dtype.itemsize > os.fstat(file.fileno()).st_size:
        raise ValueError("it is shorter than its tensors")
    return torch.empty(shape, dtype=dtype, device="cpu")


def _fill(file: Any, tensor: Tensor) -> None:
    rest = _bytes_of(tensor)
    while rest.nbytes:
        count = file.readinto(rest)
        if not count:
            raise EOFError("it ends early")
        rest = rest[count:]
