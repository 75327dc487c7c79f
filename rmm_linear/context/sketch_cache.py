"""Layers that read the same tensor share one sketch of it.

Autograd stores an input once, however many layers read it; so do we. A sketch is found by the identity of the input
(the tensor or a view of the same memory, unchanged since by its version counter), the spec and the mask. The input
itself is held weakly: when it is gone, and at the latest when the forward pass is over, the sketch belongs to autograd
alone, which frees it after the last of the layers' backward passes.

Layers of two selective checkpoints share nothing, nor do those inside and outside of one: each is recomputed by itself,
and must then find the operators that ran in it before. Each has a dispatch mode of its own, which tells them apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode


@dataclass
class _Entry:
    source: weakref.ref[Tensor]
    version: int
    saved: tuple[Tensor, ...]
    layers: list[int]


@dataclass
class SketchCache:
    """The sketches that were made in this forward pass.

    Attributes:
        groups: Numbers of the layers that were seen to share one sketch, each group once.
    """

    groups: set[tuple[int, ...]] = field(default_factory=set)
    _entries: dict[tuple[Hashable, ...], _Entry] = field(default_factory=dict)
    _task: int = -1

    def find(self, source: Tensor, key: tuple[Hashable, ...], index: int) -> tuple[Tensor, ...] | None:
        """Return the sketch of a tensor that another layer made.

        Args:
            source: The layer's input.
            key: What else the sketch depends on.
            index: Number of the layer that asks.

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
        """Remember the sketch that a layer has made of a tensor, as long as that lives.

        Args:
            source: The layer's input.
            key: What else the sketch depends on.
            index: Number of the layer.
            saved: The tensors to save.
        """
        full_key, this = _full_key(source, key), weakref.ref(self)
        self._forget(full_key)

        def forget(_: object) -> None:
            if (owner := this()) is not None:
                owner._forget(full_key)

        self._entries[full_key] = _Entry(weakref.ref(source, forget), source._version, saved, [index])

    def clear(self) -> None:
        """Let go of all sketches; autograd keeps those it needs."""
        for key in list(self._entries):
            self._forget(key)

    def _forget(self, key: tuple[Hashable, ...]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None and len(entry.layers) > 1:
            self.groups.add(tuple(entry.layers))

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles take the groups along and no tensors."""
        return {"groups": set(self.groups), "_entries": {}, "_task": -1}


def _full_key(source: Tensor, key: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    place = (source.data_ptr(), source.shape, source.stride(), source.dtype, source.device)
    return (place, _get_current_dispatch_mode(), *key)
