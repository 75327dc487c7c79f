"""LayerNorm and RMSNorm from a packed copy with the C library, see :mod:`rmm_linear.packing.norms`."""

from __future__ import annotations

import torch
from torch import Tensor

from rmm_linear.backends.native.library import TYPES, function, pointer, threads

Noise = tuple[Tensor, Tensor, Tensor]  # signs, rows and columns, as rounding_noise returns them


def pack_norm(
    x: Tensor,
    index: Tensor | None,
    centered: bool,
    eps: float,
    bits: int,
    noise: Noise,
    codes: Tensor,
    qparams: Tensor,
    rstd: Tensor,
) -> bool:
    """Normalize rows and round them to ``bits`` per element.

    Args:
        x: float32, bfloat16 or float16, shape (N, H), elements of a row side by side.
        index: The n rows to save, int64, contiguous; None for all.
        centered: True for LayerNorm, False for RMSNorm.
        eps: What is added to the variance.
        bits: 8, 4 or 2.
        noise: Random numbers for n rows and H columns.
        codes: Written to; uint8, shape (n, ⌈H · bits / 8⌉), contiguous.
        qparams: Written to; bfloat16, shape (n, ⌈H / 64⌉, 2), contiguous.
        rstd: Written to; float32, shape (n,), contiguous.

    Returns:
        Whether all qparams are finite.
    """
    count, columns = threads(x), x.shape[1]
    buffer = codes.new_empty(count, columns, dtype=torch.float32)
    result = function("rmm_pack_norm")(
        pointer(x), TYPES[x.dtype], x.stride(0), pointer(index), len(rstd), columns, centered,
        eps, bits, *map(pointer, noise), pointer(codes), pointer(qparams), pointer(rstd),
        pointer(buffer), count,
    )  # fmt: skip
    return result == 0


def norm_gradients(
    y: Tensor,
    index: Tensor | None,
    centered: bool,
    bits: int,
    gamma: Tensor,
    noise: Noise,
    codes: Tensor,
    qparams: Tensor,
    rstd: Tensor,
    x: Tensor,
    sums: bool,
) -> Tensor | None:
    """Compute the gradients of a norm from what :func:`pack_norm` has written.

    Args:
        y: Gradient with respect to the output, float32, bfloat16 or float16, shape (N, H), elements of a row side by
            side.
        index: As for packing.
        centered: As for packing.
        bits: As for packing.
        gamma: γ, float32, shape (H,), contiguous.
        noise: As for packing.
        codes: See :func:`pack_norm`.
        qparams: See :func:`pack_norm`.
        rstd: See :func:`pack_norm`.
        x: Written to: gradient with respect to the input, float32 or a half type, shape (N, H), contiguous. Rows that
            are not in ``index`` are left as they are.
        sums: Whether the sums over rows are needed.

    Returns:
        dγ and dβ, float64, shape (2, H), or None.
    """
    columns, count = y.shape[1], threads(y)
    buffer = y.new_zeros(count, 5, columns, dtype=torch.float32)
    totals = y.new_zeros(count, 2, columns, dtype=torch.float64) if sums else None
    function("rmm_norm_backward")(
        pointer(y), TYPES[y.dtype], y.stride(0), pointer(index), len(rstd), columns, centered,
        bits, pointer(gamma), *map(pointer, noise), pointer(codes), pointer(qparams), pointer(rstd),
        pointer(x), TYPES[x.dtype], pointer(buffer), pointer(totals), count,
    )  # fmt: skip
    return None if totals is None else totals.sum(0)
