"""Walk the Python stack: is a module called inside of a call of itself, and does a checkpoint run?

PyTorch has no other way to tell. It runs no hook after a KeyboardInterrupt, and has no flag for functions that run
inside of ``torch.utils.checkpoint.checkpoint``. These functions are called rarely: the first when a model is called
while it seems to be running already, the others in the forward passes of probes and examples.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from torch import Tensor, nn


def is_called_inside_itself(module: nn.Module) -> bool:
    """Say whether the call of a module that has just begun is inside of another one, as in a module that calls itself.

    Args:
        module: The module, from whose forward pre-hook this function is called.

    Returns:
        False if an earlier call was interrupted instead.
    """
    calls = [f for f in _frames() if f.f_code.co_name == "_call_impl" and f.f_locals.get("self") is module]
    return len(calls) > 1


def in_checkpoint() -> bool:
    """Say whether the caller runs inside of a function that PyTorch's activation checkpointing will recompute.

    Returns:
        True inside of ``torch.utils.checkpoint.checkpoint``.
    """
    return any(frame.f_globals.get("__name__") == "torch.utils.checkpoint" for frame in _frames())


def checkpoint_inputs() -> list[Tensor] | None:
    """Find the tensors that ``torch.utils.checkpoint.checkpoint`` was called with, if the caller runs inside of it.

    Returns:
        The positional ones, which it keeps until the backward pass; None outside of it.
    """
    frames = [frame for frame in _frames() if frame.f_globals.get("__name__") == "torch.utils.checkpoint"]
    given = [value for frame in frames for value in frame.f_locals.get("args", ())]
    return [value for value in given if isinstance(value, Tensor)] if frames else None


def _frames() -> Iterator[FrameType]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
