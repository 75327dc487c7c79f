"""Row sampling with importance: norm_rows and wta, whose S depends on the input.

Token i is drawn with a probability p_i ∝ ‖xᵢ‖·ŷᵢ, mixed with a little of the uniform distribution so that none is 0. ŷᵢ
is what is expected of ‖yᵢ‖. It may come from anywhere but Y itself: p and the draws are made before Y, so every
statement below holds for every Y.

norm_rows draws K tokens independently, with replacement. Row k of SᵀM is row j of M by 1/√(K p_j), and dŴ is the mean
of K independent terms yⱼᵀxⱼ/p_j of mean dW. With dᵢ = ‖xᵢ‖²‖yᵢ‖² and g = ‖XᵀY‖²,

    Var = (Σᵢ dᵢ/pᵢ − g)/K.

wta ("the winner takes it all") keeps the c most probable tokens C as they are, and draws the other K − c rows from the
rest R, token j with probability p_j/t, t = Σ_R p. Row k is row j of M by √(t/((K−c) p_j)). C adds no noise, hence

    Var = (t · Σ_R dᵢ/pᵢ − ‖Σ_R xᵢyᵢᵀ‖²)/(K − c),   c = argmin over 0 ≤ c < K of t_c/(K − c).

With one p, wta is never noisier than norm_rows. Let A_C, A_R be the sums of dᵢ/pᵢ over C and R, and g_R the norm above.
By Cauchy and Schwarz, g ≤ ‖Σ_C xᵢyᵢᵀ‖²/(1−t) + g_R/t ≤ A_C + g_R/t, so (A_C + A_R − g)/K ≥ (t A_R − g_R)/(K t). That
is at least (t A_R − g_R)/(K − c) where t ≤ (K − c)/K, and t_c/(K − c) is at most its value for c = 0, 1/K.

Where the n tokens that count fit into K rows, these are the rows, without noise.

Cost: one pass for the norms, a sort of N numbers; of the matrix, only the rows drawn are read. Nothing waits for the
device. Stored are the rows and their scales, 8 bytes per row, because a seed alone could not tell them without X.

Source: Liu et al. 2023, arXiv 2305.15265, eq. 6 and theorem 2. Their code is biased in three branches; this is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rmm_linear.sketches.family import accumulator_dtype
from rmm_linear.sketches.masks import TokenMask

UNIFORM_MIX = 0.1


class RowSample(NamedTuple):
    """The rows of a sample: row k of SᵀM is ``scale[k] · M[index[k]]``.

    Attributes:
        index: int32, shape (K,).
        scale: float32, shape (K,). A row of scale 0 belongs to no token.
    """

    index: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Sampler:
    """A kind whose S depends on the input, by the probability of every token.

    Attributes:
        name: The ``kind`` users write.
        summary: One line for tables and help texts.
        winners: ``winners(tails, rows)`` is c, int64 of shape (1,): how many tokens are kept as they are. ``tails[c]``
            is what the probabilities of all but the c largest sum to.
    """

    name: str
    summary: str
    winners: Callable[[Tensor, int], Tensor]


def _none(tails: Tensor, rows: int) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=tails.device)


def _least_chance_per_row(tails: Tensor, rows: int) -> Tensor:
    left = torch.arange(rows, 0, -1, device=tails.device)
    return (tails[:rows] / left[: len(tails)]).argmin().view(1)


NORM_ROWS = Sampler("norm_rows", "rows drawn by their expected share of the gradient", _none)
WTA = Sampler("wta", "the largest expected shares kept as they are, the rest drawn", _least_chance_per_row)


def row_norms(matrix: Tensor) -> Tensor:
    """Return the Euclidean norm of every row.

    Args:
        matrix: Floating point, shape (N, D).

    Returns:
        float32 or float64, shape (N,).
    """
    return torch.linalg.vector_norm(matrix, dim=1, dtype=accumulator_dtype(matrix.dtype))


def probabilities(
    norms: Tensor,
    uniform_mix: float = UNIFORM_MIX,
    expected: Tensor | None = None,
    mask: TokenMask | None = None,
) -> Tensor:
    """Return the probability of every token, p = (1 − u) · w/Σw + u/n with w = ‖x‖·ŷ.

    Rows whose norm is not finite share half of the probability, the others the other half: K draws miss them with a
    chance of 2⁻ᴷ, so that what is not finite arrives in dW as without a sketch. Where ŷ is negative or not finite, the
    mean of its other values stands in. Where all weights are 0, p is uniform.

    Args:
        norms: ‖xᵢ‖, shape (N,), N ≥ 1.
        uniform_mix: u in (0, 1].
        expected: ŷ, shape (N,); None where nothing is known of it.
        mask: The n tokens that count; the others have probability 0. None is all.

    Returns:
        float64, shape (N,); its sum is 1.

    Raises:
        ValueError: If ``uniform_mix`` is out of range, or ``expected`` has another shape.

    Example:
        >>> probabilities(torch.tensor([3.0, 1.0]), 0.5)
        tensor([0.6250, 0.3750], dtype=torch.float64)
    """
    if not 0 < uniform_mix <= 1:
        raise ValueError(
            f"uniform_mix must be in (0, 1], got {uniform_mix}. A token that is never sampled would be missing."
        )
    if expected is not None and expected.shape != norms.shape:
        raise ValueError(f"expected must have one number per token, {tuple(norms.shape)}, got {tuple(expected.shape)}.")
    weights = norms.double()
    real = torch.ones_like(weights, dtype=torch.bool) if mask is None else mask.valid
    if expected is not None:
        known = expected.double()
        good = real & known.isfinite() & (known >= 0)
        mean = torch.where(good, known, 0).sum() / good.sum()
        weights = weights * torch.where(good, known, torch.where(good.any(), mean, 1))
    finite = weights.isfinite()
    weights = torch.where(real & finite, weights, 0)
    top = weights.amax()
    weights = weights / torch.where(top > 0, top, 1)  # or the sum may be infinite
    total, uniform = weights.sum(), real.double() / real.sum()
    p = torch.where(total > 0, (1 - uniform_mix) * weights / total + uniform_mix * uniform, uniform)
    bad = (real & ~finite).double()
    return torch.where(bad.any(), (p + bad / bad.sum()) / 2, p)


def sample_rows(p: Tensor, keys: Tensor, kind: Sampler, mask: TokenMask | None = None) -> RowSample:
    """Sample K rows by the inverse of the cumulative distribution.

    Args:
        p: Probability of every token, float64, shape (N,), N > K; 0 for those that do not count, or are never drawn.
        keys: 63-bit random keys, int64, shape (..., K): one sample for every vector of K.
        kind: norm_rows or wta.
        mask: The tokens that count, or None for all.

    Returns:
        Rows and scales, each of the shape of ``keys``. For wta the tokens kept as they are come first.

    Raises:
        ValueError: If K is not at least 1 and less than N.
    """
    rows = keys.shape[-1]
    if not 1 <= rows < len(p):
        raise ValueError(f"rows must be at least 1 and less than the {len(p)} tokens, got {rows}. Keep them all.")
    order, tails, kept = _ranked(p, rows, kind)
    place, mass = torch.arange(rows, device=p.device), tails[kept]
    chance = (keys >> 10).double() * 2.0**-53 * mass
    # Summed from the smallest on: neither is a small token lost in rounding nor one of probability 0 ever found.
    rank = len(p) - 1 - torch.searchsorted(tails.flip(0), chance, right=True)
    index = order[torch.where(place < kept, place, torch.maximum(rank, kept))]
    drawn = torch.where(mass > 0, (mass / ((rows - kept) * p[index])).sqrt(), 0)  # or the winners are all there is
    scale = torch.where(place < kept, 1, drawn)
    if mask is not None:
        fits = mask.count <= rows
        index = torch.where(fits, mask.order[:rows], index)
        scale = torch.where(fits, (place < mask.count).double(), scale)
    return RowSample(index.int(), scale.float())


def _ranked(p: Tensor, rows: int, kind: Sampler) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens from the most probable on, what p sums to from each of them on, and c."""
    ranked, order = p.sort(descending=True, stable=True)
    tails = ranked.flip(0).cumsum(0).flip(0)
    return order, tails, kind.winners(tails, rows)


def gather(matrix: Tensor, sample: RowSample) -> Tensor:
    """Return SᵀM for a sample.

    Args:
        matrix: M, shape (N, D).
        sample: Rows and scales.

    Returns:
        Shape (K, D), dtype of ``matrix``; zero where the scale is 0, whatever the row holds.
    """
    scale = sample.scale.to(accumulator_dtype(matrix.dtype)).unsqueeze(-1)
    return torch.where(scale == 0, 0, matrix.index_select(0, sample.index.long()) * scale).to(matrix.dtype)


def variance(x: Tensor, y: Tensor, p: Tensor, rows: int, kind: Sampler) -> Tensor:
    """Return E‖dŴ − dW‖² exactly.

    Args:
        x: Layer input, shape (N, I).
        y: Gradient by the layer output, shape (N, O).
        p: Probability of every token, shape (N,).
        rows: K, less than N.
        kind: norm_rows or wta.

    Returns:
        float64 scalar; infinite where a token of probability 0 has a gradient, which would be missing from dW.
    """
    order, tails, kept = _ranked(p.double(), rows, kind)
    rest = order[int(kept) :]
    a, b, p = x[rest].double(), y[rest].double(), p[rest].double()
    d = a.square().sum(1) * b.square().sum(1)
    shares = torch.where(d == 0, d, d / p).sum()
    weighed = torch.where(tails[kept] > 0, tails[kept] * shares, shares)  # 0 times infinity is what is never drawn
    drawn = (weighed - (a.T @ b).square().sum()).squeeze()
    # Where one token is all there is, rounding must not make a variance below zero.
    return drawn.clamp_min(0) / (rows - kept.squeeze())
