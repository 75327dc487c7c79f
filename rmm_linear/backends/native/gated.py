"""The packed products of a gated MLP with the C library, see :mod:`rmm_linear.packing.gated`."""

from __future__ import annotations

import torch
from torch import Tensor

from rmm_linear.backends.native import rounding_noise
from rmm_linear.backends.native.library import TYPES, function, pointer, threads

Noise = tuple[Tensor, Tensor, Tensor]
Packed = tuple[Tensor, Tensor]
_NOTHING = (None, None)


def gated_noise(seeds: Tensor, stream: int, rows: int, columns: int) -> Noise:
    """Draw the random numbers of both products.

    Args:
        seeds: int64, shape (2,).
        stream: Number of the stream.
        rows: Rows that are packed.
        columns: Their columns.

    Returns:
        Signs, float32, shape (2, 64); int32 of shape (2, rows) and of shape (2, columns).
    """
    first, second = (rounding_noise(seeds[i : i + 1], stream, rows, columns) for i in range(2))
    signs, a, c = (torch.stack(pair) for pair in zip(first, second, strict=True))
    return signs, a, c


def pack_gated(
    a: Tensor,
    b: Tensor,
    activation: int,
    bits: int,
    noise: Noise,
    packed: list[Packed | None],
    index: Tensor | None,
) -> bool:
    """Pack b · act'(a) and act(a) in one pass.

    Args:
        a: float32, bfloat16 or float16, shape (N, C); elements of a row side by side.
        b: Shape and dtype of ``a``; elements of a row side by side.
        activation: Place of the activation in :data:`rmm_linear.packing.gated.ACTIVATIONS`.
        bits: 8, 4 or 2.
        noise: Of :func:`gated_noise`.
        packed: Written to; codes and qparams of both products, contiguous, or None.
        index: Rows to store, int64, shape (n,), contiguous, or None.

    Returns:
        Whether all qparams are finite.
    """
    rows, columns = noise[1].shape[1], a.shape[1]
    count = threads(a)
    buffer = a.new_empty(count, 2, columns, dtype=torch.float32)
    return not function("rmm_pack_gated")(
        pointer(a), pointer(b), TYPES[a.dtype], a.stride(0), b.stride(0), rows, columns, pointer(index),
        activation, bits, *map(pointer, noise), *_pointers(packed), pointer(buffer), count,
    )  # fmt: skip


def apply_gated(
    y: Tensor,
    bits: int,
    noise: Noise,
    packed: list[Packed | None],
    index: Tensor | None,
    gradients: list[Tensor | None],
) -> None:
    """Write y · p and y · s, each unpacked and rotated back on the way.

    Args:
        y: float32, bfloat16 or float16, shape (N, C), contiguous.
        bits: 8, 4 or 2.
        noise: Of :func:`gated_noise`.
        packed: Codes and qparams of both products, contiguous, or None.
        index: The rows that are stored, int64, shape (n,), contiguous, or None.
        gradients: Written to in these rows; shape and dtype of ``y``, contiguous; None where ``packed`` is None.
    """
    function("rmm_apply_gated")(
        pointer(y), TYPES[y.dtype], noise[1].shape[1], y.shape[1], pointer(index), bits,
        *map(pointer, noise), *_pointers(packed), *map(pointer, gradients), threads(y),
    )  # fmt: skip


def _pointers(packed: list[Packed | None]) -> list[int]:
    return [pointer(tensor) for one in packed for tensor in (one or _NOTHING)]
