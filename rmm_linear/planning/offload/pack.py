"""Offload the tensors that autograd saves: some stay as they are, the storages of others are copied out once.

With hooks PyTorch no longer finds that a saved tensor was changed in place. So each one stores its version counter (a
tensor without memory that shares it), and a change is the error that it is without hooks. A change that moves no
counter (``.data``, a kernel of other code) is the backward pass's only if it comes before the tensor is saved; one
that comes later may be seen or not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from rmm_linear.memory.peak import storages

# Bytes of a storage that stays where it is. To begin a copy takes tens of microseconds, a file more: as long as copying
# some 100 KB. What is smaller (statistics of norms, seeds) hardly shows in the peak.
SMALL = 64 * 1024


class Saved(Protocol):
    """A storage that was copied out."""

    def add(self) -> int:
        """Count one more tensor that needs it."""
        ...

    def unpack(self, number: int) -> Tensor:
        """Return all of its bytes, uint8 of one dimension."""
        ...


class SavedTensor:
    """A tensor that was saved."""

    def unpack(self) -> Tensor:
        raise NotImplementedError


class _Kept(SavedTensor):
    """A tensor that stays where it is, without its graph, which has this."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version

    def unpack(self) -> Tensor:
        _check(self.tensor, self.version, self.tensor.dtype, self.tensor.size())
        return self.tensor


class _Moved(SavedTensor):
    """A tensor whose storage was copied out."""

    def __init__(self, tensor: Tensor, content: Tensor, saved: Saved) -> None:
        self.saved, self.number = saved, saved.add()
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()
        self.conj, self.neg = tensor.is_conj(), tensor.is_neg()
        self.version = tensor._version
        self.counter = content.detach()
        self.counter.data = content.new_empty(0)  # leaves it the counter, and no memory

    def unpack(self) -> Tensor:
        _check(self.counter, self.version, self.dtype, self.size)
        tensor = self.saved.unpack(self.number).view(self.dtype).as_strided(self.size, self.stride, self.offset)
        tensor = tensor.conj() if self.conj else tensor
        return torch.ops.aten._neg_view(tensor) if self.neg else tensor


class Packer:
    """The hook for one forward pass of one block; tensors that share a storage share its copy."""

    def __init__(self, module: nn.Module, takes: Callable[[Tensor], bool], save: Callable[[Tensor], Saved]) -> None:
        """Begin a forward pass; ``save`` copies the bytes of a storage out, uint8 of one dimension."""
        self._takes, self._save = takes, save
        self._own = {storage._cdata for storage in storages([*module.parameters(), *module.buffers()])}
        # Weak: autograd holds the hook for as long as anything that it packed, and what was freed should be freed
        self._known: dict[tuple[int, int], tuple[weakref.ref[Any], weakref.ref[Saved]]] = {}

    def __call__(self, tensor: Tensor) -> SavedTensor:
        if not self._goes(tensor):
            return _Kept(tensor)
        storage = tensor.untyped_storage()
        content = _bytes(tensor, storage.nbytes())
        key = storage._cdata, tensor._version
        known = self._known.get(key)
        # Another storage may have its address by now
        saved = known[1]() if known is not None and known[0]() is storage else None
        if saved is None:
            saved = self._save(content)
            self._known[key] = weakref.ref(storage), weakref.ref(saved)
        return _Moved(tensor, content, saved)

    def _goes(self, tensor: Tensor) -> bool:
        if type(tensor) not in (Tensor, FakeTensor) or tensor.layout != torch.strided or tensor.is_quantized:
            return False
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):  # also another module's
            return False
        storage = tensor.untyped_storage()
        whole = storage.nbytes() % tensor.element_size() == 0
        large = storage.nbytes() > SMALL and storage._cdata not in self._own
        return whole and large and self._takes(tensor)


_packer: ContextVar[Packer | None] = ContextVar("packer", default=None)  # of the block that runs


@contextmanager
def packing(packer: Packer) -> Iterator[None]:
    """Pack what is saved inside of the block."""
    before = _packer.set(packer)
    try:
        with saved_tensors_hooks(packer, unpack):
            yield
    finally:
        _packer.reset(before)


def pack(tensor: Tensor) -> SavedTensor:
    """Save a tensor past autograd, as the block that runs saves others."""
    packer = _packer.get()
    return _Kept(tensor) if packer is None else packer(tensor)


def unpack(packed: SavedTensor) -> Tensor:
    return packed.unpack()


def _bytes(tensor: Tensor, size: int) -> Tensor:
    """Return all bytes of a tensor's storage as they are there, not as they are read."""
    plain = tensor.detach()
    plain = torch.ops.aten._neg_view(plain) if plain.is_neg() else plain
    plain = plain.conj() if plain.is_conj() else plain
    return plain.as_strided((size // tensor.element_size(),), (1,), 0).view(torch.uint8)


def _check(counter: Tensor, version: int, dtype: torch.dtype, size: torch.Size) -> None:
    """Say what autograd says of a saved tensor without hooks."""
    if counter._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{dtype} {[*size]}] is at version {counter._version}; expected version {version} instead."
        )
