"""Row sampling: K tokens, uniform and without replacement, scaled by √(N/K).

Every token is kept with probability K/N, so E[S Sᵀ] = 1. With the inclusion probabilities of pairs,

    Var = (N−K)/(K(N−1)) · (N·d − g) = ((1−ρ)/ρ) · D²_SGD,   ρ = K/N.

Cost: O(K·D) and N random words; only the rows kept are read.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from rmm_linear.sketches.family import Family, Moments
from rmm_linear.sketches.philox import philox

_KEYS = 2


def sample(seed: Tensor, population: int, count: int) -> Tensor:
    """Draw ``count`` of ``population`` indices, uniformly and without replacement.

    The indices with the smallest of N random 63-bit keys; two equal keys have probability below N² / 2**64.

    Args:
        seed: int64 with one element.
        population: N.
        count: K ≤ N.

    Returns:
        int64, shape (K,), ascending.
    """
    words = philox(seed, torch.arange(population, device=seed.device), _KEYS)
    keys = (words[0] << 31) | (words[1] >> 1)
    return torch.topk(keys, count, largest=False, sorted=False).indices.sort().values


def sketch(matrix: Tensor, seed: Tensor, rows: int, block: int | None = None) -> Tensor:
    """Return SᵀM: the sampled rows, scaled.

    Args:
        matrix: M, shape (N, D).
        seed: int64 with one element, on the device of ``matrix``.
        rows: K ≤ N.
        block: Not used by this family.

    Returns:
        Shape (K, D), dtype of ``matrix``.
    """
    tokens = matrix.shape[0]
    return matrix.index_select(0, sample(seed, tokens, rows)).mul_(sqrt(tokens / rows))


def variance(x: Tensor, y: Tensor, rows: int, block: int | None = None) -> Tensor:
    """Return E‖dŴ − dW‖² exactly.

    Args:
        x: Layer input, shape (N, I).
        y: Gradient by the layer output, shape (N, O).
        rows: K.
        block: Not used by this family.

    Returns:
        float64 scalar.
    """
    tokens, m = x.shape[0], Moments.of(x, y)
    return (tokens - rows) / (rows * max(tokens - 1, 1)) * (tokens * m.d - m.g)


ROWS = Family("rows", "uniform row sampling without replacement: reads only what it keeps", sketch, variance)
