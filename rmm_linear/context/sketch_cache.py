"""Share sketches of one input among the layers that read it.

Autograd saves an input once, however many layers read it, and :class:`SketchCache` does the same for sketches. A sketch
is found by the input, which is unchanged by its version counter, the spec and the mask; where an engine as ZeRO-3 hands
each layer a view of its own, by the memory of the views. (Not elsewhere: memory that is used again may be written
through another tensor, with a counter of its own.) The cache has a weak reference to it, and is empty after the forward
pass; autograd frees a sketch after the last backward pass of the layers that saved it. Layers of different selective
checkpoints do not share a sketch, nor do layers inside and outside of one: every checkpoint is recomputed by itself and
must then run the same operators as before. Their dispatch modes tell them apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rmm_linear._support.distributed import is_fresh_view
from rmm_linear.context.surroundings import has_saving_hooks


@dataclass
class CacheEntry:
    """The sketch of one tensor: what is saved, None until the first layer has made it, and the layers' indices."""

    source: weakref.ref[Tensor] | StorageWeakRef
    version: int
    layers: list[int]
    saved: tuple[Tensor, ...] | None = None

    def is_gone(self) -> bool:
        """Say whether nothing has the tensor, or its memory, any more."""
        return self.source.expired() if isinstance(self.source, StorageWeakRef) else self.source() is None

    def is_of(self, source: Tensor, is_fresh: bool) -> bool:
        """Say whether the sketch is that of a tensor at the same address, as it is now."""
        if self.is_gone() or self.version != source._version:
            return False
        return is_fresh or (not isinstance(self.source, StorageWeakRef) and self.source() is source)


_FEW = 64  # sketches of inputs that may be gone, at least, before a search for them


@dataclass
class SketchCache:
    """The sketches of the current forward pass."""

    # Groups of layers that have shared one sketch, as tuples of their indices
    groups: set[tuple[int, ...]] = field(default_factory=set)
    _entries: dict[tuple[Hashable, ...], CacheEntry] = field(default_factory=dict)
    _task: int = -1
    _most: int = _FEW
    _alone: set[int] = field(default_factory=set)  # layers that were looked at in a forward pass, and share with none

    def is_shared(self, index: int) -> bool:
        """Say whether a layer shares a sketch, or may: one that was alone in a forward pass need not look for it."""
        return index not in self._alone

    def entry(self, source: Tensor, weight: Tensor | None, key: tuple[Hashable, ...], index: int) -> CacheEntry:
        """Return the entry of a tensor that a layer of this weight reads; the first layer that asks sets ``saved``."""
        task = torch._C._current_graph_task_id()  # recomputations of two backward passes share nothing
        if task != self._task:
            self.clear()
            self._task = task
        is_fresh = is_fresh_view(source, weight)
        full_key = _full_key(source, (is_fresh, *key))
        known = self._entries.get(full_key)
        if known is not None:
            if known.saved is not None and known.is_of(source, is_fresh):
                known.layers.append(index)
                return known
            self._forget(full_key)
        if len(self._entries) >= self._most:
            self._sweep()
        made = self._entries[full_key] = CacheEntry(
            self._reference(source, full_key, is_fresh), source._version, [index]
        )
        return made

    def _sweep(self) -> None:
        """Drop the sketches of inputs that are gone, as those of steps inside of a forward pass."""
        for key in [key for key, entry in self._entries.items() if entry.is_gone()]:
            self._forget(key)
        self._most = 2 * len(self._entries) + _FEW

    def _reference(
        self, source: Tensor, key: tuple[Hashable, ...], is_fresh: bool
    ) -> weakref.ref[Tensor] | StorageWeakRef:
        """A weak reference; in a recomputation, and where hooks may drop what is saved, the sketch goes with it."""
        if self._task == -1 and not has_saving_hooks():
            return StorageWeakRef(source.untyped_storage()) if is_fresh else weakref.ref(source)
        this = weakref.ref(self)

        def forget(_: object) -> None:
            if (owner := this()) is not None:
                owner._forget(key)

        return weakref.ref(source, forget)

    def clear(self) -> None:
        """Drop all sketches; autograd holds those that were saved."""
        for key in list(self._entries):
            self._forget(key)

    def _forget(self, key: tuple[Hashable, ...]) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        if len(entry.layers) > 1:
            self.groups.add(tuple(entry.layers))
            self._alone.difference_update(entry.layers)
        elif not any(entry.layers[0] in group for group in self.groups):
            self._alone.update(entry.layers)

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles have the groups and no tensors."""
        return {"groups": set(self.groups), "_entries": {}, "_task": -1, "_most": _FEW, "_alone": set()}


def _full_key(source: Tensor, key: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    # A fake tensor has no address, but the storage of the tensor that it stands for.
    fake = type(source) is not Tensor and isinstance(source, FakeTensor)
    address = (source.untyped_storage()._cdata, source.storage_offset()) if fake else source.data_ptr()
    return address, source.shape, source.stride(), source.dtype, source.device, _get_current_dispatch_mode(), *key
