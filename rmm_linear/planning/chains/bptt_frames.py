"""Kept states: in memory or in a store, with what the cell reads beside them: random generators and buffers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from rmm_linear.memory.ledger import StorageKey, storage_key
from rmm_linear.planning.chains.cells import Recorded
from rmm_linear.planning.replay.snapshots import restrided
from rmm_linear.planning.stores.base import StoreError


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

    def __init__(self, position: int, leaves: list[Any], around: Around | None, store: Any, run: str) -> None:
        """Put a state into a store.

        Args:
            position: The step.
            leaves: The state.
            around: What the step reads besides.
            store: The store.
            run: A name that no other run has.

        Raises:
            StoreError: If it cannot be put there.
        """
        super().__init__(position, [None if isinstance(leaf, Tensor) else leaf for leaf in leaves], around)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._devices = [tensor.device for tensor in tensors]
        self._strides = [tensor.stride() for tensor in tensors]
        self._kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        self._store, self._key = store, f"bptt-{run}-{position:08d}"
        copies = [tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous() for tensor in tensors]
        self._drop = weakref.finalize(self, store.drop, self._key)
        self._drop.atexit = False
        try:
            with self._naming("stored"):
                store.put(self._key, copies)
        except BaseException:
            with contextlib.suppress(Exception):  # what there is of it
                self._drop()
            raise

    def read(self) -> list[Any]:
        """Return the state from the store.

        Returns:
            Its leaves.

        Raises:
            StoreError: If it does not come back as it was.
        """
        leaves = super().read()
        with self._naming("read"):
            tensors = self._store.get(self._key)
            kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if kinds != self._kinds:
            raise StoreError(
                f"The state before step {self.position} must come back as it was stored, but store.get returned "
                f"{[(dtype, tuple(shape)) for dtype, shape in kinds]} for the key {self._key!r}. Let get return what "
                "put was given."
            )
        for place, tensor, device, stride in zip(self._places, tensors, self._devices, self._strides, strict=True):
            leaves[place] = restrided(tensor.to(device), stride)
        return leaves

    def release(self) -> None:
        """Drop it in the store."""
        with self._naming("dropped"):
            self._drop()

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Turn errors of the store into one that names the step and the key."""
        begin = f"The state before step {self.position} could not be {what}"
        try:
            yield
        except StoreError as error:
            raise StoreError(f"{begin}: {error}") from error
        except Exception as error:
            raise StoreError(
                f"{begin} under the key {self._key!r}: {error!r}. See to the store, and run the forward pass again."
            ) from error


def release_all(frames: Sequence[Frame]) -> None:
    """Release frames after an error, which is the one to be told."""
    for frame in frames:
        with contextlib.suppress(Exception):
            frame.release()


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
