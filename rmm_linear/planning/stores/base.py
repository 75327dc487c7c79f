"""The interface of stores, and their error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import Tensor


class StoreError(RuntimeError):
    """A state could not be stored or did not come back as it was; the message names the step and the file."""


@runtime_checkable
class Store(Protocol):
    """Holds states until they are asked for. One thread calls it, one call at a time."""

    def put(self, key: str, tensors: list[Tensor]) -> None:
        """Store tensors under a key that no other state has: letters, digits and dashes.

        The tensors are contiguous and on the CPU. They may be the state's own, so they must not be changed.
        """
        ...

    def get(self, key: str) -> list[Tensor]:
        """Return the tensors of a key, the same to the bit, and keep them."""
        ...

    def drop(self, key: str) -> None:
        """Forget the tensors of a key."""
        ...


def named(error: BaseException, step: int, what: str, key: str) -> StoreError:
    """Turn an error of a store into one that names the step and the key."""
    begin = f"The state before step {step} could not be {what}"
    if isinstance(error, StoreError):
        return StoreError(f"{begin}: {error}")
    return StoreError(f"{begin} under the key {key!r}: {error!r}. See to the store, and run the forward pass again.")


@contextmanager
def naming(step: int, what: str, key: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise named(error, step, what, key) from error
