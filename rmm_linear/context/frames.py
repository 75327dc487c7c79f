"""What only the Python stack knows: whether a call lies below another one of the same module, or in a checkpoint.

PyTorch runs no hook after a KeyboardInterrupt, and tells nobody that a function runs inside of
``torch.utils.checkpoint.checkpoint``. Both are asked for rarely: when a model is called while it seems to be running,
and in the forward passes that a probe looks at.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from torch import nn


def is_called_inside_itself(module: nn.Module) -> bool:
    """Say whether a call of a module lies below the one that has just begun, as in a module that calls itself.

    Args:
        module: The module, in a forward pre-hook of which this is asked.

    Returns:
        False if an earlier call was interrupted instead.
    """
    calls = [f for f in _frames() if f.f_code.co_name == "_call_impl" and f.f_locals.get("self") is module]
    return len(calls) > 1


def in_checkpoint() -> bool:
    """Say whether a function is running that PyTorch's activation checkpointing will run again.

    Returns:
        True inside of ``torch.utils.checkpoint.checkpoint``.
    """
    return any(frame.f_globals.get("__name__") == "torch.utils.checkpoint" for frame in _frames())


def _frames() -> Iterator[FrameType]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
