"""Row sampling with importance: norm_rows and wta, whose S depends on the input.

Token i is sampled with a probability p_i ∝ ‖xᵢ‖·ŷᵢ, mixed with a little of the uniform distribution so that none is 0.
ŷᵢ predicts ‖yᵢ‖ and must not depend on Y itself: the rows are sampled before Y is known, so every statement below holds
for every Y.

norm_rows samples K tokens independently, with replacement. Row k of SᵀM is row j of M times 1/√(K p_j), and dŴ is the
mean of K independent terms yⱼᵀxⱼ/p_j of mean dW. With dᵢ = ‖xᵢ‖²‖yᵢ‖² and g = ‖XᵀY‖²,

    Var = (Σᵢ dᵢ/pᵢ − g)/K.

wta ("winner take all") saves the c most probable tokens C unscaled, and samples the other K − c rows from the rest R,
token j with probability p_j/t, t = Σ_R p. Row k is row j of M times √(t/((K−c) p_j)). C adds no noise, hence

    Var = (t · Σ_R dᵢ/pᵢ − ‖Σ_R xᵢyᵢᵀ‖²)/(K − c),   c = argmin over 0 ≤ c < K of t_c/(K − c).

With one p, wta is never noisier than norm_rows. Let A_C, A_R be the sums of dᵢ/pᵢ over C and R, and g_R the norm above.
By Cauchy and Schwarz, g ≤ ‖Σ_C xᵢyᵢᵀ‖²/(1−t) + g_R/t ≤ A_C + g_R/t, so (A_C + A_R − g)/K ≥ (t A_R − g_R)/(K t). That
is at least (t A_R − g_R)/(K − c) where t ≤ (K − c)/K, and t_c/(K − c) is at most its value for c = 0, 1/K.

If the n valid tokens fit into K rows, the sample is these tokens, without noise.

Cost: one pass for the norms, a sort of N numbers; of the matrix, only the sampled rows are read. Nothing waits for the
device. The indices and scales of the rows are saved, 8 bytes per row: they do not follow from a seed without X.

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
_CAST = 2**20  # elements of a half type whose norms are computed at once


class RowSample(NamedTuple):
    """Sampled rows: row k of SᵀM is ``scale[k] · M[index[k]]``."""

    index: Tensor  # int32, shape (K,)
    scale: Tensor  # float32, shape (K,). A row with scale 0 is no token.


@dataclass(frozen=True)
class Sampler:
    """A kind whose S depends on the input through the probabilities of the tokens."""

    name: str
    summary: str  # one line for tables and help texts
    # Winners(tails, rows) is c, int64 of shape (1,): how many tokens are saved unscaled. tails[c] is the sum of all
    # probabilities but the c largest.
    winners: Callable[[Tensor, int], Tensor]


def _none(tails: Tensor, rows: int) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=tails.device)


def _least_chance_per_row(tails: Tensor, rows: int) -> Tensor:
    left = torch.arange(rows, 0, -1, device=tails.device)
    return (tails[:rows] / left[: len(tails)]).argmin().view(1)


NORM_ROWS = Sampler("norm_rows", "rows sampled by their expected share of the gradient", _none)
WTA = Sampler("wta", "rows with the largest expected shares saved exactly, the rest sampled", _least_chance_per_row)


def row_norms(matrix: Tensor) -> Tensor:
    """Return the Euclidean norm of every row of a matrix (N, D), float32 or float64."""
    dtype, is_half = accumulator_dtype(matrix.dtype), matrix.dtype in (torch.float16, torch.bfloat16)
    has_graph = matrix.requires_grad and torch.is_grad_enabled()
    if matrix.device.type != "cpu" or not is_half or has_graph or torch.compiler.is_compiling():
        return torch.linalg.vector_norm(matrix, dim=1, dtype=dtype)
    # On CPUs, torch casts half types far faster than it reduces them. All parts share a buffer: new memory is slow.
    rows = min(max(_CAST // max(matrix.shape[1], 1), 1), matrix.shape[0])
    buffer, norms = matrix.new_empty((rows, matrix.shape[1]), dtype=dtype), matrix.new_empty(len(matrix), dtype=dtype)
    for begin in range(0, len(matrix), max(rows, 1)):
        part = matrix[begin : begin + rows]
        torch.linalg.vector_norm(buffer[: len(part)].copy_(part), dim=1, out=norms[begin : begin + rows])
    return norms


def probabilities(
    norms: Tensor,
    uniform_mix: float = UNIFORM_MIX,
    expected: Tensor | None = None,
    mask: TokenMask | None = None,
) -> Tensor:
    """Return the probability of every token, p = (1 − u) · w/Σw + u/n with w = ‖x‖·ŷ, float64, shape (N,).

    Rows whose norm is not finite share half of the probability, the others the other half: K samples miss the former
    with a probability of 2⁻ᴷ, so that dW is not finite, as it would be without a sketch. Where ŷ is negative or not
    finite, the mean of its other values replaces it. If all weights are 0, p is uniform.

    norms: ‖xᵢ‖, shape (N,), N ≥ 1. expected: ŷ, shape (N,); None without a prediction. mask: The n valid tokens; the
    others have probability 0.
    """
    if not 0 < uniform_mix <= 1:
        raise ValueError(
            f"uniform_mix must be in (0, 1], got {uniform_mix}. A token that is never sampled would be missing."
        )
    if expected is not None and expected.shape != norms.shape:
        raise ValueError(f"expected must have one number per token, {tuple(norms.shape)}, got {tuple(expected.shape)}.")
    weights = norms.double()
    valid = torch.ones_like(weights, dtype=torch.bool) if mask is None else mask.valid
    if expected is not None:
        known = expected.double()
        good = valid & known.isfinite() & (known >= 0)
        mean = torch.where(good, known, 0).sum() / good.sum()
        weights = weights * torch.where(good, known, torch.where(good.any(), mean, 1))
    finite = weights.isfinite()
    weights = torch.where(valid & finite, weights, 0)
    top = weights.amax()
    weights = weights / torch.where(top > 0, top, 1)  # the sum of unscaled weights may be infinite
    total, uniform = weights.sum(), valid.double() / valid.sum()
    p = torch.where(total > 0, (1 - uniform_mix) * weights / total + uniform_mix * uniform, uniform)
    bad = (valid & ~finite).double()
    return torch.where(bad.any(), (p + bad / bad.sum()) / 2, p)


def sample_rows(p: Tensor, keys: Tensor, kind: Sampler, mask: TokenMask | None = None) -> RowSample:
    """Sample K rows by the inverse of the cumulative distribution: indices and scales, of the shape of ``keys``.

    p: Probability of every token, float64, shape (N,), N > K; 0 for tokens that are not valid or never sampled. keys:
    63-bit random keys, int64, shape (..., K): one sample for every vector of K. For wta the c tokens with scale 1 come
    first.
    """
    rows = keys.shape[-1]
    if not 1 <= rows < len(p):
        raise ValueError(f"rows must be at least 1 and less than the {len(p)} tokens, got {rows}. Store them all.")
    order, tails, winners = _ranked(p, rows, kind)
    place, mass = torch.arange(rows, device=p.device), tails[winners]
    chance = (keys >> 10).double() * 2.0**-53 * mass
    # Summed from the smallest probability on: rounding loses no small one, and tokens of probability 0 are never found.
    rank = len(p) - 1 - torch.searchsorted(tails.flip(0), chance, right=True)
    index = order[torch.where(place < winners, place, torch.maximum(rank, winners))]
    sampled = torch.where(mass > 0, (mass / ((rows - winners) * p[index])).sqrt(), 0)  # 0: no other tokens
    scale = torch.where(place < winners, 1, sampled)
    if mask is not None:
        fits = mask.count <= rows
        index = torch.where(fits, mask.order[:rows], index)
        scale = torch.where(fits, (place < mask.count).double(), scale)
    return RowSample(index.int(), scale.float())


def _ranked(p: Tensor, rows: int, kind: Sampler) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens by descending probability, the sum of p from each of them on, and c."""
    ranked, order = p.sort(descending=True, stable=True)
    tails = ranked.flip(0).cumsum(0).flip(0)
    return order, tails, kind.winners(tails, rows)


def gather(matrix: Tensor, sample: RowSample) -> Tensor:
    """Return SᵀM, (K, D), for sampled rows of M (N, D); zero where the scale is 0, even if the row is not finite."""
    scale = sample.scale.to(accumulator_dtype(matrix.dtype)).unsqueeze(-1)
    return torch.where(scale == 0, 0, matrix.index_select(0, sample.index.long()) * scale).to(matrix.dtype)


def variance(x: Tensor, y: Tensor, p: Tensor, rows: int, kind: Sampler) -> Tensor:
    """Return E‖dŴ − dW‖² exactly, a float64 scalar, for x (N, I), y (N, O) and probabilities p (N,).

    It is infinite if a token of probability 0 has a gradient, which would be missing from dW.
    """
    order, tails, winners = _ranked(p.double(), rows, kind)
    rest = order[int(winners) :]
    a, b, p = x[rest].double(), y[rest].double(), p[rest].double()
    d = a.square().sum(1) * b.square().sum(1)
    shares = torch.where(d == 0, d, d / p).sum()
    weighted = torch.where(tails[winners] > 0, tails[winners] * shares, shares)  # not 0 · ∞, if none can be sampled
    total = (weighted - (a.T @ b).square().sum()).squeeze()
    # If the rest has a single token, rounding could make the variance negative.
    return total.clamp_min(0) / (rows - winners.squeeze())
