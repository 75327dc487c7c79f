"""Bytes kept for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class SavedBytes:
    """What autograd kept during a tracked block.

    Attributes:
        storages: Address of every distinct storage kept to its size in bytes.
    """

    storages: dict[int, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes of the distinct storages kept, parameters and buffers excluded."""
        return sum(self.storages.values())


@contextmanager
def track_saved(model: nn.Module) -> Iterator[SavedBytes]:
    """Count the bytes that autograd keeps for the backward pass.

    Each storage counts once, whoever keeps it and however often; parameters and buffers of ``model`` do not count.

    Args:
        model: The model that runs inside the block.

    Yields:
        The counter; read its ``total`` after the forward pass.

    Example:
        >>> layer = nn.Linear(4, 3)
        >>> with track_saved(layer) as kept:
        ...     _ = layer(torch.ones(10, 4))
        >>> kept.total  # the input, 10 × 4 × 4 bytes
        160
    """
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = SavedBytes()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.nbytes():
            kept.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
