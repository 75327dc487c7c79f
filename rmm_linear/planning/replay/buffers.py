"""What a step or a layer writes besides its result: buffers such as BatchNorm's running statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Place(NamedTuple):
    """Where a buffer is: a module may put another tensor there."""

    owner: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        """The buffer that is there now."""
        return self.owner.get_buffer(self.name)


def buffer_places(modules: Iterable[nn.Module]) -> list[Place]:
    """Return the places of the modules' buffers, one of each buffer that they share."""
    found: dict[int, Place] = {}
    for owner in (part for module in modules for part in module.modules()):
        for name, buffer in owner.named_buffers(recurse=False):
            found.setdefault(id(buffer), Place(owner, name))
    return list(found.values())


def buffer_values(places: Sequence[Place], last: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Return copies of buffers.

    Args:
        places: Where they are.
        last: Earlier copies. They are returned, and take no memory again, where nothing has changed since.

    Returns:
        A tensor for each.
    """
    earlier = [None] * len(places) if last is None else last
    return [
        old if old is not None and torch.equal(place.tensor, old) else place.tensor.detach().clone()
        for place, old in zip(places, earlier, strict=True)
    ]


def set_buffer_values(places: Sequence[Place], values: Sequence[Tensor]) -> None:
    """Write what :func:`buffer_values` returned, behind autograd's back: a graph may have saved a buffer.

    Args:
        places: Where the buffers are.
        values: What to write.
    """
    for place, value in zip(places, values, strict=True):
        if not torch.equal(place.tensor, value):
            place.tensor.data.copy_(value)


@contextmanager
def restored_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the modules' buffers at the end of the block: a repeated forward pass would update them once more.

    Args:
        modules: The modules.

    Yields:
        Nothing.
    """
    places = buffer_places(modules)
    before = buffer_values(places)
    try:
        yield
    finally:
        with torch.no_grad():
            for place, value in zip(places, before, strict=True):
                if not torch.equal(place.tensor, value):
                    place.tensor.copy_(value)
