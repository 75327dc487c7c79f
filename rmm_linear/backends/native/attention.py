"""Softmax and its gradient with the C library, see :mod:`rmm_linear.packing.attention_gradients`."""

from __future__ import annotations

from torch import Tensor

from rmm_linear.backends.native.library import function, pointer, threads


def softmax_gradients(scores: Tensor, dp: Tensor) -> None:
    """Do what :func:`rmm_linear.packing.attention_gradients.softmax_gradients` does.

    Args:
        scores: float32, shape (…, Tk), contiguous; overwritten.
        dp: float32, the same shape, contiguous; overwritten.
    """
    columns = scores.shape[-1]
    rows = scores.numel() // max(1, columns)
    function("rmm_softmax_gradients")(pointer(scores), pointer(dp), rows, columns, threads(scores))
