"""Turn variances into settings: the ratio that reaches a target, and the batch size with the same variance."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from rmm_linear._support.autocast import without_autocast
from rmm_linear.variance.arguments import over_layers
from rmm_linear.variance.closed_forms import sgd_variance, sketch_variance

_GRID = 16

Number = TypeVar("Number", float, Tensor)


@without_autocast
def required_ratio(
    x: Tensor,
    grad_output: Tensor,
    *,
    kind: str,
    bits: float | None,
    target: float,
    samples: tuple[int, int] | Tensor | None = None,
    block: int | None = None,
    mask: Tensor | None = None,
    probabilities: Tensor | None = None,
) -> Tensor:
    """Return the smallest ratio K/N with D²_sketch ≤ target · D²_SGD on this batch.

    K is found by bisection over the exact variances: K rows meet the target and K − 1 do not. Without ``bits`` the
    variance falls with K for all kinds. For countsketch and wta there are small exceptions, where the segments move or
    one more token is saved exactly, so a slightly smaller K may meet the target too. With ``bits`` the variance falls
    until all tokens are stored, and may be larger there: the rounding error of a token that is stored by itself is
    multiplied by its own gradient, while a mixture of many tokens spreads it. So if storing all tokens does not meet
    the target, 16 evenly spaced smaller K are tried too. See :func:`sketch_variance` for the rounding term.

    Cost: log₂ N evaluations of :func:`sketch_variance`, and at most 16 more.

    Args:
        x: Layer input, shape (N, I), or (L, N, I) for L layers.
        grad_output: Gradient with respect to the layer's output, shape (N, O), or (L, N, O); zero where ``mask`` is
            false.
        kind: One of :data:`rmm_linear.sketches.KINDS`.
        bits: 8, 4, 3, 2, 1.6, 1, or None for the dtype itself.
        target: Variance of the sketch divided by that of the minibatch: 1 doubles the variance of the gradient.
        samples: As for :func:`sgd_variance`.
        block: Tokens per block, or None.
        mask: True for valid tokens, shape (N,); None is all.
        probabilities: As for :func:`sketch_variance`.

    Returns:
        float64, shape () or (L,). A ratio in (0, 1], for ``RMMConfig(ratio=...)``; inf if none of the K that were tried
        meets the target, which only rounding can cause: use more bits. NaN where X or Y has a NaN.

    Raises:
        ValueError: If ``target`` is not positive.

    Example:
        >>> x, y = torch.eye(8), torch.eye(8)
        >>> required_ratio(x, y, kind="rows", bits=None, target=1.0)  # ((1 − ρ)/ρ) · D²_SGD
        tensor(0.5000, dtype=torch.float64)
    """
    if not target > 0:
        raise ValueError(f"target must be positive, got {target}. 1 is as much variance as the minibatch has.")

    def smallest(a: Tensor, b: Tensor, p: Tensor | None = None) -> Tensor:
        limit = target * sgd_variance(a, b, samples=samples)

        def meets_target(rows: int) -> bool:
            noise = sketch_variance(a, b, kind=kind, rows=rows, bits=bits, block=block, mask=mask, probabilities=p)
            return bool(noise <= limit)

        if limit.isnan():
            return limit
        too_few, enough = 0, a.shape[0]
        if not meets_target(enough):
            tokens = enough if mask is None else int(mask.bool().sum())  # a larger K makes no difference
            grid = sorted({max(1, tokens * part // _GRID) for part in range(1, _GRID)} | {max(1, tokens - 1)})
            enough = next(filter(meets_target, grid), 0)
            if not enough:
                return torch.full_like(limit, math.inf)
            too_few = max((rows for rows in grid if rows < enough), default=0)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            too_few, enough = (too_few, middle) if meets_target(middle) else (middle, enough)
        return torch.full_like(limit, enough / a.shape[0])

    return over_layers(smallest, x, grad_output, probabilities)


def effective_batch(batch: int, noise: Number) -> Number:
    """Return the batch size whose minibatch variance alone equals that of the minibatch and the sketch together.

    The sketch is unbiased for every batch, so the two variances add up. That of the minibatch falls like 1/batch:
    D²_SGD · batch/B = D²_SGD + D²_sketch gives B = batch/(1 + noise).

    Args:
        batch: Samples per batch: sequences, or tokens if the noise is by tokens.
        noise: D²_sketch / D²_SGD of this batch, a number or a tensor.

    Returns:
        Batch size in samples, of the type and shape of ``noise``; not rounded.

    Raises:
        ValueError: If ``batch`` is not positive, or ``noise`` is negative.

    Example:
        >>> effective_batch(32, 1.0)
        16.0
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1 sample, got {batch}.")
    if bool((noise < 0).any()) if isinstance(noise, Tensor) else noise < 0:
        raise ValueError(f"noise must not be negative, as it is a ratio of variances, got {noise}.")
    return batch / (1 + noise)
