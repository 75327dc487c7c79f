"""Cyclic CountSketch: every token is added, with a random sign, to one row of Z.

Number the tokens 0 … N−1 and cut them into ⌈N/K⌉ segments of K. Segment s has one random shift c_s, uniform in [0, K);
token s·K + j goes to row (j + c_s) mod K with a random sign. So two tokens of one segment never collide, two of
different segments collide with probability 1/K, reads are contiguous, and there is no permutation and no index array.

The first segment is not shifted and its signs are +1. Compared with a random shift and signs, this permutes the rows of
Z and flips the signs of some, alike for X and Y, so the estimate is the same; the other segments' shifts and signs
relative to it are as random as before. The first K tokens are just copied, and with N ≤ K nothing else is done.

Random signs give E[S Sᵀ] = 1. Two tokens that collide contribute like two tokens of a dense sketch of signs, hence

    Var = (1/K) · [ (P + g − 2d) − Σ_s (P_s + g_s − 2d_s) ],

sums over segments. N ≤ K: no collision and no noise. Cost: O(N·D), every row is read once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rmm_linear.sketches.family import Family, Moments, accumulator_dtype
from rmm_linear.sketches.philox import Generator, philox, unpack_signs


def signs_and_shifts(seed: Tensor, tokens: int, rows: int, generator: Generator = philox) -> tuple[Tensor, Tensor]:
    """Return the sign of every token, int8 (N,), and the cyclic shift of every segment, int64 (⌈N/K⌉,) in [0, rows).

    The sign of token i is bit i % 32 of the first word of counter i // 32. The shift of segment s comes from the second
    word of counter s: the high word of its product with ``rows`` is uniform up to rows / 2**32. The first segment
    has the shift 0 and the signs +1.
    """
    segments, words = -(-tokens // rows), -(-tokens // 32)
    first, second, *_ = generator(seed, torch.arange(max(segments, words), device=seed.device), 0)
    signs, shifts = unpack_signs(first[:words]).view(-1)[:tokens], (second[:segments] * rows) >> 32
    signs[:rows], shifts[:1] = 1, 0
    return signs, shifts


def destinations(shifts: Tensor, tokens: int, rows: int) -> Tensor:
    """Return the row of Z that every token is added to, int64."""
    index = torch.arange(tokens, device=shifts.device)
    return (index % rows + shifts[index // rows]) % rows


def sketch(
    matrix: Tensor,
    seed: Tensor,
    rows: int,
    block: int | None = None,
    count: Tensor | None = None,
    generator: Generator = philox,
) -> Tensor:
    """Return SᵀM of M (N, D), summed in float32 at least. Zero rows at the end have no effect."""
    tokens = matrix.shape[0]
    if matrix.device.type == "cpu":
        return part(matrix, seed, rows, generator)(0, rows)
    if tokens <= rows:
        return _zero_padded(matrix, rows)
    # Reading the shifts on the host would wait for the device.
    dtype = accumulator_dtype(matrix.dtype)
    sign, shifts = signs_and_shifts(seed, tokens, rows, generator)
    place = destinations(shifts, tokens, rows)[rows:]
    others = matrix[rows:].to(dtype) * sign[rows:].unsqueeze(1)
    return matrix[:rows].to(dtype, copy=True).index_add_(0, place, others).to(matrix.dtype)


def part(matrix: Tensor, seed: Tensor, rows: int, generator: Generator = philox) -> Callable[[int, int], Tensor]:
    """Return a function of ``begin`` and ``end`` that makes these rows of SᵀM on CPU."""
    if matrix.shape[0] <= rows:
        return lambda begin, end: _zero_padded(matrix[begin:end], end - begin)
    return hashed_part(matrix, *signs_and_shifts(seed, matrix.shape[0], rows, generator), rows)


def hashed_part(matrix: Tensor, signs: Tensor, shifts: Tensor, rows: int) -> Callable[[int, int], Tensor]:
    """Return a function that makes rows of SᵀM, N > K, from signs, int8 (N,), and shifts, int64 (⌈N/K⌉,)."""
    tokens, dtype = matrix.shape[0], accumulator_dtype(matrix.dtype)
    sign, others = signs.to(dtype).unsqueeze(1), list(enumerate(shifts.tolist()))[1:]

    def make(begin: int, end: int) -> Tensor:
        result = matrix[begin:end].to(dtype, copy=True)
        for segment, shift in others:
            # Row r gets token r − shift of the segment; the rows before the shift get the segment's last tokens.
            for low, high, place in ((max(begin, shift), end, -shift), (begin, min(end, shift), rows - shift)):
                first = segment * rows + low + place
                count = min(high - low, tokens - first)
                if count > 0:
                    added = slice(first, first + count)
                    result[low - begin : low - begin + count].addcmul_(matrix[added].to(dtype), sign[added])
        return result.to(matrix.dtype)

    return make


def _zero_padded(matrix: Tensor, rows: int) -> Tensor:
    return torch.cat((matrix, matrix.new_zeros(rows - matrix.shape[0], matrix.shape[1])))


def variance(x: Tensor, y: Tensor, rows: int, block: int | None = None, count: Tensor | None = None) -> Tensor:
    """Return E‖dŴ − dW‖² exactly, a float64 scalar, for x (N, I) and y (N, O)."""
    inside = [Moments.of(*pair).signed for pair in zip(x.split(rows), y.split(rows), strict=True)]
    return (Moments.of(x, y).signed - torch.stack(inside).sum()) / rows


COUNTSKETCH = Family(
    "countsketch",
    "balanced hashing with signs: one pass over X (default)",
    sketch,
    variance,
    local=True,
    part=part,
    reads_seed=True,
)
