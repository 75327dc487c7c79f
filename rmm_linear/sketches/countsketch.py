"""Cyclic CountSketch: every token is added, with a random sign, to one row of Z.

Number the tokens 0 … N−1 and cut them into ⌈N/K⌉ segments of K. Segment s has one random shift c_s, uniform in [0, K);
token s·K + j goes to row (j + c_s) mod K with a random sign. So two tokens of one segment never meet, two of different
segments meet with probability 1/K, reads are contiguous, and there is no permutation and no index array.

Random signs give E[S Sᵀ] = 1. Two tokens that meet contribute like two tokens of a dense sketch of signs, hence

    Var = (1/K) · [ (P + g − 2d) − Σ_s (P_s + g_s − 2d_s) ],

sums over segments. N ≤ K: no collision and no noise. Cost: O(N·D), every row is read once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rmm_linear.sketches.family import Family, Moments, accumulator_dtype
from rmm_linear.sketches.philox import philox, signs

_SIGNS, _SHIFTS = 0, 1


def shifts(seed: Tensor, segments: int, rows: int) -> Tensor:
    """Return the cyclic shift of every segment, uniform in [0, rows).

    The product of a random 32-bit word and ``rows`` is cut to its high word, which is uniform up to rows / 2**32.

    Args:
        seed: int64 with one element.
        segments: Number of segments.
        rows: K.

    Returns:
        int64, shape (segments,).
    """
    return (philox(seed, torch.arange(segments, device=seed.device), _SHIFTS)[0] * rows) >> 32


def destinations(seed: Tensor, tokens: int, rows: int) -> Tensor:
    """Return the row of Z that every token is added to.

    Args:
        seed: int64 with one element.
        tokens: N.
        rows: K.

    Returns:
        int64 in [0, rows), shape (tokens,).
    """
    index = torch.arange(tokens, device=seed.device)
    shift = shifts(seed, -(-tokens // rows), rows)
    return (index % rows + shift[index // rows]) % rows


def sketch(matrix: Tensor, seed: Tensor, rows: int, block: int | None = None, count: Tensor | None = None) -> Tensor:
    """Return SᵀM.

    Args:
        matrix: M, shape (N, D).
        seed: int64 with one element, on the device of ``matrix``.
        rows: K.
        block: Not used by this family.
        count: Not used: zero rows at the end change nothing.

    Returns:
        Shape (K, D), dtype of ``matrix``; sums are made in float32 at least.
    """
    tokens, columns = matrix.shape
    dtype = accumulator_dtype(matrix.dtype)
    sign = signs(seed, tokens, _SIGNS).to(dtype).unsqueeze(1)
    result = torch.zeros(rows, columns, dtype=dtype, device=matrix.device)
    if matrix.device.type != "cpu":
        # Reading the shifts on the host would wait for the device.
        result.index_add_(0, destinations(seed, tokens, rows), matrix.to(dtype) * sign)
        return result.to(matrix.dtype)
    for segment, shift in enumerate(shifts(seed, -(-tokens // rows), rows).tolist()):
        first, last = segment * rows, min((segment + 1) * rows, tokens)
        turn = min(first + rows - shift, last)  # tokens from here on wrap to row 0
        for begin, end, row in ((first, turn, shift), (turn, last, 0)):
            result[row : row + end - begin].addcmul_(matrix[begin:end].to(dtype), sign[begin:end])
    return result.to(matrix.dtype)


def variance(x: Tensor, y: Tensor, rows: int, block: int | None = None, count: Tensor | None = None) -> Tensor:
    """Return E‖dŴ − dW‖² exactly.

    Args:
        x: Layer input, shape (N, I).
        y: Gradient by the layer output, shape (N, O).
        rows: K.
        block: Not used by this family.
        count: Not used: zero rows at the end change nothing.

    Returns:
        float64 scalar.
    """
    inside = [Moments.of(*pair).signed for pair in zip(x.split(rows), y.split(rows), strict=True)]
    return (Moments.of(x, y).signed - torch.stack(inside).sum()) / rows


COUNTSKETCH = Family(
    "countsketch", "balanced hashing with signs: one pass over X (default)", sketch, variance, local=True
)
