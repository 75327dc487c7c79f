"""Helpers that the launchers share."""

import contextlib

import torch
import triton


def precision() -> str:
    """How float32 tiles are multiplied: to float32's precision, on the matrix unit where it can."""
    return "tf32x3" if torch.version.cuda is not None else "ieee"


def upcast() -> bool:
    """Whether half types are multiplied in float32: Triton's interpreter multiplies bfloat16 wrongly."""
    return not isinstance(_nothing, triton.JITFunction)


@triton.jit
def _nothing():
    pass


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Make a tensor's device the current one: Triton launches there."""
    if tensor.device.type == "cpu":
        return contextlib.nullcontext()
    return getattr(torch, tensor.device.type).device(tensor.device)


def places(index: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """For each of ``rows`` rows its place in an index of distinct rows, −1 where it has none; None without an index."""
    if index is None:
        return None
    place = torch.full((rows,), -1, dtype=torch.int64, device=index.device)
    place[index] = torch.arange(index.shape[0], device=index.device)
    return place
