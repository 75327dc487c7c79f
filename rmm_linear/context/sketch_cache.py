"""Share one sketch among the layers that read the same tensor.

Autograd saves an input once, however many layers read it, and this cache does the same for sketches. A sketch is found
by the identity of the input (the tensor or a view of the same memory, unchanged by its version counter), the spec and
the mask. The cache has a weak reference to the input. When the input is freed, or at the end of the forward pass, the
cache drops the sketch; autograd frees it after the last backward pass of the layers that saved it.

Layers of different selective checkpoints do not share a sketch, nor do layers inside and outside of one: every
checkpoint is recomputed by itself and must then run the same operators as before. Their dispatch modes tell them apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode


@dataclass
class _Entry:
    source: weakref.ref[Tensor]
    version: int
    saved: tuple[Tensor, ...]
    layers: list[int]


@dataclass
class SketchCache:
    """The sketches of the current forward pass.

    Attributes:
        groups: Groups of layers that have shared one sketch, as tuples of their indices.
    """

    groups: set[tuple[int, ...]] = field(default_factory=set)
    _entries: dict[tuple[Hashable, ...], _Entry] = field(default_factory=dict)
    _task: int = -1

    def find(self, source: Tensor, key: tuple[Hashable, ...], index: int) -> tuple[Tensor, ...] | None:
        """Return the sketch of a tensor that another layer has made.

        Args:
            source: The layer's input.
            key: What else the sketch depends on.
            index: Index of the layer that needs the sketch.

        Returns:
            The tensors to save, or None.
        """
        task = torch._C._current_graph_task_id()  # recomputations of two backward passes share nothing
        if task != self._task:
            self.clear()
            self._task = task
        entry = self._entries.get(_full_key(source, key))
        if entry is None or entry.source() is None or entry.version != source._version:
            return None
        entry.layers.append(index)
        return entry.saved

    def add(self, source: Tensor, key: tuple[Hashable, ...], index: int, saved: tuple[Tensor, ...]) -> None:
        """Remember the sketch that a layer has made of a tensor, for as long as the tensor lives.

        Args:
            source: The layer's input.
            key: What else the sketch depends on.
            index: Index of the layer.
            saved: The tensors to save.
        """
        full_key, this = _full_key(source, key), weakref.ref(self)
        self._forget(full_key)

        def forget(_: object) -> None:
            if (owner := this()) is not None:
                owner._forget(full_key)

        self._entries[full_key] = _Entry(weakref.ref(source, forget), source._version, saved, [index])

    def clear(self) -> None:
        """Drop all sketches; autograd holds those that were saved."""
        for key in list(self._entries):
            self._forget(key)

    def _forget(self, key: tuple[Hashable, ...]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None and len(entry.layers) > 1:
            self.groups.add(tuple(entry.layers))

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles have the groups and no tensors."""
        return {"groups": set(self.groups), "_entries": {}, "_task": -1}


def _full_key(source: Tensor, key: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    # A fake tensor has no address, but the storage of the tensor that it stands for.
    fake = isinstance(source, FakeTensor)
    address = (source.untyped_storage()._cdata, source.storage_offset()) if fake else source.data_ptr()
    place = (address, source.shape, source.stride(), source.dtype, source.device)
    return (place, _get_current_dispatch_mode(), *key)
