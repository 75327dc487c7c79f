"""The gradients of attention with the C library: rows are unpacked, and softmax is made between the products, in C."""

from __future__ import annotations

import torch
from torch import Tensor

from rmm_linear.backends.native.library import function, pointer, threads
from rmm_linear.ops.native.masks import apply_mask
from rmm_linear.ops.native.sketches import unpacked_rows
from rmm_linear.packing.attention_gradients import Rows, Steps


def softmax_gradients(scores: Tensor, dp: Tensor) -> None:
    """Do what :func:`rmm_linear.packing.attention_gradients.softmax_gradients` does.

    Args:
        scores: float32, shape (…, Tk), contiguous; overwritten.
        dp: float32, the same shape, contiguous; overwritten.
    """
    columns = scores.shape[-1]
    rows = scores.numel() // max(1, columns)
    function("rmm_softmax_gradients")(pointer(scores), pointer(dp), rows, columns, threads(scores))


def rows_of(codes: Tensor, qparams: Tensor, seed: Tensor, bits: int, columns: int, dtype: torch.dtype) -> Rows:
    """Unpack rows, some at a time; in float32, whatever the dtype."""
    return unpacked_rows(codes, qparams, seed, bits, columns, dtype)


def steps_of(dtype: torch.dtype) -> Steps:
    """Return the steps for gradients of a dtype, which are made in float32 at least."""
    return Steps() if dtype == torch.float64 else Steps(softmax_gradients, apply_mask)
