"""What a step or a layer writes besides its result: buffers such as BatchNorm's running statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def restored_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the modules' buffers at the end of the block: a repeated forward pass would update them once more.

    Args:
        modules: The modules.

    Yields:
        Nothing.
    """
    buffers = list(dict.fromkeys(buffer for module in modules for buffer in module.buffers()))
    before = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                if not torch.equal(buffer, value):  # writing would make a tensor that is saved for backward another one
                    buffer.copy_(value)
