"""The variance formula and the bound from the paper, for comparison.

Neither holds in general; the docstrings give counterexamples. For the exact variance of a sketch, use
:func:`rmm_linear.variance.sketch_variance`.

Source: Bershatsky et al. 2022, arXiv 2201.13195, the lemma on D²_RMM and the theorem on its ratio to D²_SGD.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rmm_linear._support.validation import check_integer
from rmm_linear.sketches import Moments
from rmm_linear.variance.arguments import over_layers
from rmm_linear.variance.closed_forms import correlation


def paper_sketch_variance(x: Tensor, grad_output: Tensor, *, rows: int) -> Tensor:
    """Return (P − g)/K, which the paper states as the variance of the sketched gradient.

    It is not the variance of any kind: for independent normal entries, which the paper uses, the variance is (P + g)/K,
    for random signs (P + g − 2d)/K. For a single token P = g = d, and the formula gives 0, while a normal sketch of one
    row has the variance 2P. For ``gaussian`` the formula is too small by the factor (1 − α)/(1 + α).

    Args:
        x: Layer input, shape (N, I), or (L, N, I) for L layers.
        grad_output: Gradient with respect to the layer's output, shape (N, O), or (L, N, O).
        rows: K.

    Returns:
        float64, shape () or (L,), in squared units of the weight gradient.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [0.5]])
        >>> paper_sketch_variance(x, y, rows=1)  # exact: 10.25 for gaussian, 6.25 for rademacher
        tensor(2.2500, dtype=torch.float64)
    """
    check_integer("rows", rows)

    def lemma(a: Tensor, b: Tensor) -> Tensor:
        moments = Moments.of(a, b)
        return (moments.p - moments.g) / rows

    return over_layers(lemma, x, grad_output)


def paper_bound(x: Tensor, grad_output: Tensor) -> Tensor:
    """Return (α + 1)/α, which the paper states as a bound on K/(N−1) · D²_sketch/D²_SGD, with tokens as samples.

    It is not a bound. For x = (1, 2) and y = (1, ½) both tokens have the same gradient, so D²_SGD = 0, while K times
    the paper's own D²_sketch is 2.25: the ratio is infinite and the bound 2.5625. No function of α alone can bound the
    ratio: x = (1, a) and y = (1, 1/a) have D²_SGD = 0 with every α below 1. Where it holds it is loose: α is small in
    practice, and the bound is hundreds of times the ratio. The authors' notebook plots 1 + α instead.

    Args:
        x: Layer input, shape (N, I), or (L, N, I) for L layers.
        grad_output: Gradient with respect to the layer's output, shape (N, O), or (L, N, O).

    Returns:
        float64, shape () or (L,), without unit. NaN where X or Y is zero.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [0.5]])
        >>> paper_bound(x, y)
        tensor(2.5625, dtype=torch.float64)
    """
    return bound_of(correlation(x, grad_output))


def bound_of(alpha: Any) -> Any:
    """Return (α + 1)/α, see :func:`paper_bound`."""
    return (alpha + 1) / alpha
