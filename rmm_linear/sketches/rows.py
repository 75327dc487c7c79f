"""Row sampling: K tokens, uniform and without replacement, scaled by √(N/K).

Every token is sampled with probability K/N, so E[S Sᵀ] = 1. With the inclusion probabilities of pairs,

    Var = (N−K)/(K(N−1)) · (N·d − g) = ((1−ρ)/ρ) · D²_SGD,   ρ = K/N.

Cost: O(K·D) and N random words; only the sampled rows are read.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor

from rmm_linear.sketches.family import Family, Moments, accumulator_dtype
from rmm_linear.sketches.philox import Generator, philox

_KEYS = 2


def random_keys(seed: Tensor, count: int, generator: Generator = philox) -> Tensor:
    """Return random 63-bit keys, int64 in [0, 2**63), shape (count,)."""
    words = generator(seed, torch.arange(count, device=seed.device), _KEYS)
    return (words[0] << 31) | (words[1] >> 1)


def sample(
    seed: Tensor, population: int, size: int, count: Tensor | None = None, generator: Generator = philox
) -> Tensor:
    """Sample ``size`` of ``population`` indices, ascending, uniformly and without replacement.

    They are the indices with the smallest of N random 63-bit keys; two equal keys have probability below N² / 2**64.

    count: n, int64, shape (1,): sample from the first n indices; others are only taken if K > n. None is N.
    """
    keys = random_keys(seed, population, generator)
    if count is not None:
        index = torch.arange(population, device=seed.device)
        keys = torch.where(index < count, keys, torch.iinfo(torch.int64).max - population + index)
    return torch.topk(keys, size, largest=False, sorted=False).indices.sort().values


def sketch(
    matrix: Tensor,
    seed: Tensor,
    rows: int,
    block: int | None = None,
    count: Tensor | None = None,
    generator: Generator = philox,
) -> Tensor:
    """Return SᵀM of M (N, D): K of its first n rows, sampled and scaled."""
    if count is None:
        return part(matrix, seed, rows, generator)(0, rows)
    sampled = matrix.index_select(0, sample(seed, matrix.shape[0], rows, count, generator))
    return (sampled * (count.to(accumulator_dtype(matrix.dtype)) / rows).sqrt()).to(matrix.dtype)


def part(matrix: Tensor, seed: Tensor, rows: int, generator: Generator = philox) -> Callable[[int, int], Tensor]:
    """Return a function of ``begin`` and ``end`` that makes these rows of SᵀM."""
    tokens = matrix.shape[0]
    sampled = sample(seed, tokens, rows, generator=generator)
    return lambda begin, end: matrix.index_select(0, sampled[begin:end]).mul_(sqrt(tokens / rows))


def variance(x: Tensor, y: Tensor, rows: int, block: int | None = None, count: Tensor | None = None) -> Tensor:
    """Return E‖dŴ − dW‖² exactly, a float64 scalar, for x (N, I) and y (N, O), whose rows from n on are zero."""
    tokens, m = x.shape[0] if count is None else int(count), Moments.of(x, y)
    return (tokens - rows) / (rows * max(tokens - 1, 1)) * (tokens * m.d - m.g)


ROWS = Family("rows", "uniform row sampling without replacement: reads only its sample", sketch, variance, part=part)
