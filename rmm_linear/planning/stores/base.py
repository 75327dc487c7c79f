"""What a store is, and its error."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


class StoreError(RuntimeError):
    """A state could not be stored or did not come back as it was; the message names the step and the file."""


@runtime_checkable
class Store(Protocol):
    """What keeps states until they are asked for. One thread calls it, one call at a time."""

    def put(self, key: str, tensors: list[Tensor]) -> None:
        """Keep tensors under a key that no other state has.

        Args:
            key: Letters, digits and dashes: fit for a file's name.
            tensors: Contiguous tensors on the CPU. They may be the state's own, so they must not be changed.
        """
        ...

    def get(self, key: str) -> list[Tensor]:
        """Return the tensors of a key, the same to the bit, and keep them.

        Args:
            key: What was given to :meth:`put`.
        """
        ...

    def drop(self, key: str) -> None:
        """Forget the tensors of a key.

        Args:
            key: What was given to :meth:`put`.
        """
        ...
