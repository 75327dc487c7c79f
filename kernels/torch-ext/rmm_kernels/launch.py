"""Helpers that the launchers share."""

import contextlib
import functools

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


def tile_rows(is_single: bool, is_heavy: bool, is_asynchronous: bool) -> int:
    """Rows of a tile that fit into registers.

    is_single: Whether inputs are float32. is_heavy: Whether a kernel packs two matrices, or has a path for short
    groups. is_asynchronous: Whether products read their matrices from shared memory, as on sm_90 and sm_100.
    """
    return 32 if (is_heavy and (is_single or not is_asynchronous)) or (is_single and not is_asynchronous) else 64


def rows_for(tensor: torch.Tensor, dtype: torch.dtype, is_heavy: bool) -> int:
    """See tile_rows; ``tensor`` lies on the device."""
    is_asynchronous = tensor.is_cuda and _is_asynchronous(tensor.device.index)
    return tile_rows(dtype == torch.float32, is_heavy, is_asynchronous)


@functools.cache
def _is_asynchronous(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index)[0] in (9, 10)


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
