"""Helpers that the launchers share."""

import contextlib

import torch
import triton
import triton.language as tl

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def cdiv(number: int, by: int) -> int:
    """Divide and round up; Triton's own takes three microseconds."""
    return -(-number // by)


def precision() -> str:
    """How float32 tiles are multiplied: to float32's precision, on the matrix unit where it can."""
    return "tf32x3" if torch.version.cuda is not None else "ieee"


def is_ieee() -> bool:
    """Whether float32 tiles are multiplied in float32, where the matrix unit has no tf32."""
    return precision() == "ieee"


def product_type(dtype: torch.dtype) -> tl.dtype:
    """The dtype in which tiles of a dtype are multiplied by a matrix that every dtype holds."""
    return tl.float32 if upcast() or dtype == torch.float32 else _TYPES[dtype]


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
