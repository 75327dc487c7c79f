"""Open a store for states that wait for the backward pass: memory, a folder, or a user's object."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from rmm_linear.planning.stores.base import Store
from rmm_linear.planning.stores.files import FileStore


class MemoryStore:
    """A store in the memory of the CPU: states on an accelerator are copied there, others are stored as they are."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._kept: dict[str, list[Tensor]] = {}

    def put(self, key: str, tensors: list[Tensor]) -> None:
        self._kept[key] = tensors

    def get(self, key: str) -> list[Tensor]:
        return self._kept[key]

    def drop(self, key: str) -> None:
        self._kept.pop(key, None)

    def close(self) -> None:
        self._kept.clear()


def open_store(store: Any) -> Store:
    """Turn a user's choice of a store into an object.

    Args:
        store: None or "cpu", which is the CPU's memory; a folder, which is made if it is not there; or an object with
            ``put(key, tensors)``, ``get(key)`` and ``drop(key)``, which is returned as it is.

    Returns:
        The store. Its maker closes it, if it has a method ``close``: a folder's store then removes what it wrote.

    Raises:
        TypeError: If it is none of these.

    Example:
        >>> import torch
        >>> store = open_store("cpu")
        >>> store.put("state-3", [torch.ones(2)])
        >>> store.get("state-3")
        [tensor([1., 1.])]
    """
    if store is None or (isinstance(store, str) and store == "cpu"):
        return MemoryStore()
    if isinstance(store, str | os.PathLike):
        return FileStore(store)
    if isinstance(store, Store):
        return store
    raise TypeError(
        f'store must be a folder, "cpu", or an object with put, get and drop, got {store!r}. '
        "Derive one from open_store('cpu'), whose class shows what each of them does."
    )
