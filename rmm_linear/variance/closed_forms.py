"""Closed forms of D²_SGD and D²_sketch for one layer and one batch.

D²_SGD is the variance of the minibatch gradient YᵀX as an estimate from n independent samples. With per-sample
gradients G_s and their sum G, the unbiased estimate of the variance of the sum is n/(n−1) · (Σ_s ‖G_s‖² − ‖G‖²/n).
Samples are sequences, the noise that SGD really has when a batch is made of sequences, or tokens, as in the paper,
where it reads N/(N−1) · d − g/(N−1).

‖G_s‖² = Σ_ij (x_i·x_j)(y_i·y_j) over the tokens of the sequence, so no gradient of one sequence is ever made.

Source of the token form: Bershatsky et al. 2022, arXiv 2201.13195, eq. for D²_SGD.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rmm_linear.packing import rounding_variance
from rmm_linear.sketches import TokenMask, sketch, variance


def sgd_variance(x: Tensor, grad_output: Tensor, *, samples: tuple[int, int] | None = None) -> Tensor:
    """Return D²_SGD, the variance of the weight gradient that minibatch sampling causes.

    Args:
        x: Layer input, shape (N, I).
        grad_output: Gradient by the layer's output, shape (N, O).
        samples: (batch, sequence) with batch · sequence = N: samples are sequences. None: samples are tokens.

    Returns:
        float64 scalar, in squared units of the weight gradient.

    Raises:
        ValueError: If ``samples`` does not give N rows, or there are fewer than two samples.

    Example:
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [0.5]])
        >>> sgd_variance(x, y)  # both tokens give the same gradient
        tensor(0., dtype=torch.float64)
    """
    batch, length = samples or (x.shape[0], 1)
    if batch * length != x.shape[0]:
        raise ValueError(
            f"samples must multiply to the {x.shape[0]} rows of x, got {batch} sequences of {length} tokens."
        )
    if batch < 2:
        raise ValueError(f"The variance between samples needs at least two of them, got {batch}.")
    total = (x.double().T @ grad_output.double()).square().sum()
    parts = zip(x.split(length * 8), grad_output.split(length * 8), strict=True)
    squares = torch.stack([_squared_gradients(a, b, length) for a, b in parts]).sum()
    return (batch * squares - total) / (batch - 1)


def _squared_gradients(x: Tensor, y: Tensor, length: int) -> Tensor:
    """Σ_s ‖G_s‖² over the sequences of ``length`` tokens in a few rows."""
    x, y = x.double().view(-1, length, x.shape[1]), y.double().view(-1, length, y.shape[1])
    return (torch.bmm(x, x.transpose(1, 2)) * torch.bmm(y, y.transpose(1, 2))).sum()


def sketch_variance(
    x: Tensor,
    grad_output: Tensor,
    *,
    kind: str,
    rows: int,
    bits: int | None = None,
    block: int | None = None,
    mask: Tensor | None = None,
    draws: int = 4,
) -> Tensor:
    """Return D²_sketch = E‖dŴ − dW‖² for one layer and batch.

    Exact for ``bits=None``. Packing adds E_S Σ_b ‖(SᵀY)_b‖² E‖ẑ_b − z_b‖²; the inner terms are exact for each S, from
    the rounding fractions, and the outer mean is taken over ``draws`` seeds.

    Args:
        x: Layer input, shape (N, I).
        grad_output: Gradient by the layer's output, shape (N, O); zero where ``mask`` is false.
        kind: One of :data:`rmm_linear.sketches.KINDS`.
        rows: K.
        bits: 8, 4, 2, or None for the dtype itself.
        block: Tokens per block, or None.
        mask: True for tokens that count, shape (N,); None is all.
        draws: Seeds of S to average the rounding term over.

    Returns:
        float64 scalar, in squared units of the weight gradient.

    Example:
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [0.5]])
        >>> sketch_variance(x, y, kind="rademacher", rows=1)
        tensor(6.2500, dtype=torch.float64)
    """
    ranks = None if mask is None else TokenMask.of(mask)
    total = variance(x, grad_output, kind=kind, rows=rows, block=block, mask=ranks)
    if bits is None:
        return total
    rounding = torch.zeros_like(total)
    for draw in range(draws):
        seed = torch.full((1,), draw, dtype=torch.int64, device=x.device)
        z = sketch(x, kind=kind, seed=seed, rows=rows, block=block, mask=ranks)
        y = sketch(grad_output, kind=kind, seed=seed, rows=rows, block=block, mask=ranks)
        rounding += (y.double().square().sum(1) * rounding_variance(z, bits, seed)).sum() / draws
    return total + rounding
