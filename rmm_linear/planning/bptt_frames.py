"""Kept states: in memory or in a store, with what the cell reads beside them: random generators and buffers."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from rmm_linear.memory.ledger import StorageKey, storage_key
from rmm_linear.planning.bptt_cells import Recorded

_number = itertools.count()  # of runs, so that two of them can share a store


class Around(NamedTuple):
    """What a step reads and writes besides its state.

    Attributes:
        generators: States of the random generators.
        buffers: Values of the module's buffers.
    """

    generators: list[Tensor]
    buffers: list[Tensor]


class Frame:
    """The state before a step.

    Attributes:
        position: The step.
        around: What the step reads besides, or None.
        recorded: The step before, if its graph is kept with the state.
    """

    def __init__(
        self, position: int, leaves: list[Any], around: Around | None = None, recorded: Recorded | None = None
    ) -> None:
        """Keep the leaves of a state in memory."""
        self.position, self.around, self.recorded = position, around, recorded
        self._leaves = leaves
        self._versions = [_version(leaf) for leaf in leaves]

    def read(self) -> list[Any]:
        """Return the state.

        Returns:
            Its leaves.

        Raises:
            RuntimeError: If a tensor was changed in place.
        """
        if self._versions != [_version(leaf) for leaf in self._leaves]:
            raise RuntimeError(
                f"The state before step {self.position} was changed in place, and it is needed again. "
                "Let the cell return new tensors, and clone what it puts out before changing it."
            )
        return list(self._leaves)

    def release(self) -> None:
        """Give back what is kept outside of memory."""


class StoredFrame(Frame):
    """A state whose tensors are in a store; they leave it with the frame, whatever happens."""

    def __init__(self, position: int, leaves: list[Any], around: Around | None, store: Any, run: int) -> None:
        """Put a state into a store."""
        super().__init__(position, [None if isinstance(leaf, Tensor) else leaf for leaf in leaves], around)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._devices = [tensor.device for tensor in tensors]
        self._store, self._key = store, f"bptt-{run}-{position}"
        store.put(self._key, [tensor.detach().to("cpu").contiguous() for tensor in tensors])
        self._drop = weakref.finalize(self, store.drop, self._key)
        self._drop.atexit = False

    def read(self) -> list[Any]:
        """Return the state from the store."""
        leaves = super().read()
        for place, tensor, device in zip(self._places, self._store.get(self._key), self._devices, strict=True):
            leaves[place] = tensor.to(device)
        return leaves

    def release(self) -> None:
        """Drop it in the store."""
        self._drop()


def next_run() -> int:
    """Return a number that no other run of this process has."""
    return next(_number)


def compact(leaves: Sequence[Any], lasting: set[StorageKey]) -> list[Any]:
    """Copy tensors that are a part of a larger storage, which would stay in memory as a whole.

    Args:
        leaves: Leaves of a state.
        lasting: Storages that stay in memory anyway.

    Returns:
        The leaves.
    """

    def kept(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or storage_key(leaf) in lasting:
            return leaf
        is_part = leaf.untyped_storage().nbytes() > leaf.numel() * leaf.element_size()
        return leaf.detach().clone() if is_part else leaf.detach()

    return [kept(leaf) for leaf in leaves]


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0
