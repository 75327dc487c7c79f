"""Save the state of a chain between two steps, in memory or in a store, so that it can start from there."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

from rmm_linear.memory.ledger import StorageKey, storage_key
from rmm_linear.planning.replay.replayed import Seen, versions
from rmm_linear.planning.stores.base import Store, StoreError, naming


def flatten(state: Any, origin: str) -> tuple[list[Tensor], TreeSpec]:
    leaves, structure = tree_flatten(state)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            got = f"a tensor of layout {leaf.layout}" if isinstance(leaf, Tensor) else repr(leaf)
            raise TypeError(
                f"A state must consist of dense tensors, got {got} in {origin}. Make a number torch.tensor(number), "
                "and let step capture what never changes."
            )
    if not leaves:
        raise TypeError(f"A state must have at least one tensor, got {state!r} in {origin}.")
    return leaves, structure


def is_differentiable(leaf: Any) -> bool:
    """Say whether gradients can flow through a leaf."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


@dataclass(frozen=True)
class Snapshot:
    """A state, with the generators and buffers that the step after it reads."""

    position: int  # the step before which it was taken
    leaves: list[Any]  # the state's tensors, without what a view keeps alive beyond itself; other leaves as they are
    strides: list[tuple[int, ...]]  # strides that the tensors had: a product of a transposed matrix may round otherwise
    # Version counters of the tensors when they were taken, or None where they cannot be changed
    versions: list[int] | None
    seen: Seen | None  # random generators and buffers, or None where they need not be set

    @classmethod
    def of(
        cls, position: int, leaves: Sequence[Any], seen: Seen | None = None, lasting: Collection[StorageKey] = ()
    ) -> Snapshot:
        """Take a snapshot of a state; a tensor is copied only where it is a small part of a larger storage."""
        kept = [_compact(leaf, lasting) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        strides = [leaf.stride() for leaf in leaves if isinstance(leaf, Tensor)]
        return cls(position, kept, strides, versions(_tensors(kept)), seen)

    def restored(self) -> list[Any]:
        """Return the leaves as the step saw them, tensors with their strides."""
        if self.versions is not None and self.versions != versions(_tensors(self.leaves)):
            raise RuntimeError(
                f"The state before step {self.position} must stay as it was until the backward pass, but one of its "
                "tensors was changed in place. Clone what the chain returned, or what a step puts out, before changing "
                "it, and let steps return new tensors."
            )
        strides = iter(self.strides)
        return [_restrided(leaf, next(strides)) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, for a store; :meth:`with_tensors` takes them back."""
        return [*_tensors(self.leaves), *([] if self.seen is None else self.seen.tensors)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Snapshot:
        """Return the snapshot with the tensors that a store gave back."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        seen = None if self.seen is None else self.seen.with_tensors([*given])
        return replace(self, leaves=leaves, versions=None, seen=seen)

    def without_tensors(self) -> Snapshot:
        """Return what :meth:`with_tensors` needs, which takes no memory."""
        return self.with_tensors([tensor.new_empty(0) for tensor in self.tensors])

    def release(self) -> None:
        """Give back what is stored outside of memory."""


class StoredSnapshot:
    """A snapshot whose state is in a store, and leaves it with the snapshot, whatever happens."""

    def __init__(self, snapshot: Snapshot, store: Store, run: str) -> None:
        tensors = _tensors(snapshot.leaves)
        self.position, self.seen = snapshot.position, snapshot.seen
        self._rest = replace(snapshot, seen=None).without_tensors()
        self._kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        self._store, self._key = store, f"bptt-{run}-{snapshot.position:08d}"
        copies = [tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous() for tensor in tensors]
        self._drop = weakref.finalize(self, store.drop, self._key)
        self._drop.atexit = False
        try:
            with naming(self.position, "stored", self._key):
                store.put(self._key, copies)
        except BaseException:
            with contextlib.suppress(Exception):  # what there is of it
                self._drop()
            raise

    def restored(self) -> list[Any]:
        with naming(self.position, "read", self._key):
            tensors = self._store.get(self._key)
            kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if kinds != self._kinds:
            raise StoreError(
                f"The state before step {self.position} must come back as it was stored, but store.get returned "
                f"{[(dtype, tuple(shape)) for dtype, shape in kinds]} for the key {self._key!r}. Let get return what "
                "put was given."
            )
        there = zip(tensors, _tensors(self._rest.leaves), strict=True)
        return self._rest.with_tensors([tensor.to(old.device) for tensor, old in there]).restored()

    def release(self) -> None:
        with naming(self.position, "dropped", self._key):
            self._drop()


def release_all(snapshots: Sequence[Snapshot | StoredSnapshot]) -> None:
    """Release snapshots after an error, which is the one to be told."""
    for snapshot in snapshots:
        with contextlib.suppress(Exception):
            snapshot.release()


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _compact(leaf: Tensor, lasting: Collection[StorageKey]) -> Tensor:
    if lasting and storage_key(leaf) in lasting:
        return leaf
    used = leaf.numel() * leaf.element_size()
    return leaf.detach().clone() if leaf.untyped_storage().nbytes() > used else leaf.detach()


def _restrided(leaf: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a tensor with the strides that it once had."""
    if leaf.stride() == stride or 0 in stride:  # an expanded tensor has no room for a copy
        return leaf
    return torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device=leaf.device).copy_(leaf)
