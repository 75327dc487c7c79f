"""Closed forms of D²_SGD, D²_sketch and α for one layer and one batch, or for a batch of layers.

D²_SGD is the variance of the minibatch gradient YᵀX as an estimate from n independent samples. With per-sample
gradients G_s and their sum G, the unbiased estimate of the variance of the sum is n/(n−1) · (Σ_s ‖G_s‖² − ‖G‖²/n).
Samples are sequences, which gives the noise of SGD on batches of sequences, or tokens, as in the paper, where the
estimate is N/(N−1) · d − g/(N−1).

‖G_s‖² = Σ_ij (x_i·x_j)(y_i·y_j) over the T tokens of a sequence costs T²·(I + O), and G_s itself T·I·O. The cheaper of
the two is computed; neither needs more than one matrix of I × O at a time.

Source of the token form and of α: Bershatsky et al. 2022, arXiv 2201.13195, eq. for D²_SGD.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rmm_linear._support.autocast import without_autocast
from rmm_linear._support.validation import check_integer
from rmm_linear.ops.sketches import DECODE, ENCODE, SKETCH
from rmm_linear.packing import is_normal, rounding_variance
from rmm_linear.sketches import FAMILIES, SAMPLERS, Moments, TokenMask, variance
from rmm_linear.variance.arguments import check_pair, check_sketch, over_layers, sampling_probabilities

_ELEMENTS = 1 << 22  # limit of float64 numbers that a step over several sequences allocates


@without_autocast
def correlation(x: Tensor, grad_output: Tensor) -> Tensor:
    """Return α = ‖XᵀY‖²_F / (‖X‖²_F ‖Y‖²_F), how much the tokens' gradients agree.

    By Cauchy and Schwarz α is in [0, 1]: 1 when one token has the whole gradient, small when tokens cancel. The
    variance of a dense sketch divided by the squared gradient is (1/α + 1)/K. Cost: one product of N·I·O in float64.

    Args:
        x: Layer input, shape (N, I), or (L, N, I) for L layers.
        grad_output: Gradient with respect to the layer's output, shape (N, O), or (L, N, O).

    Returns:
        float64, shape () or (L,), without unit. NaN where X or Y is zero.

    Example:
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [0.5]])
        >>> correlation(x, y)
        tensor(0.6400, dtype=torch.float64)
    """

    def alpha(a: Tensor, b: Tensor) -> Tensor:
        moments = Moments.of(a, b)
        return moments.g / moments.p

    return over_layers(alpha, x, grad_output)


@without_autocast
def sgd_variance(x: Tensor, grad_output: Tensor, *, samples: tuple[int, int] | Tensor | None = None) -> Tensor:
    """Return D²_SGD, the variance of the weight gradient that minibatch sampling causes.

    An estimate from the batch itself, unbiased if its samples are independent. Rows with a gradient of 0, such as
    padding, add nothing to a sequence. If samples are tokens, such rows count as samples: leave padding out then,
    ``x[mask]`` and ``grad_output[mask]``.

    Args:
        x: Layer input, shape (N, I), or (L, N, I) for L layers.
        grad_output: Gradient with respect to the layer's output, shape (N, O), or (L, N, O).
        samples: Unit of sampling. (batch, sequence) with batch · sequence = N: sequences of one length. int64 of
            shape (N,): the sequence that every row belongs to, any numbers in any order. None: tokens, as in the paper.

    Returns:
        float64, shape () or (L,), in squared units of the weight gradient.

    Raises:
        ValueError: If ``samples`` does not give N rows, or there are fewer than two samples.

    Example:
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [0.5]])
        >>> sgd_variance(x, y)  # both tokens give the same gradient
        tensor(0., dtype=torch.float64)
        >>> sgd_variance(torch.ones(3, 1), torch.ones(3, 1), samples=torch.tensor([7, 7, 9]))  # gradients 2 and 1
        tensor(1., dtype=torch.float64)
    """
    check_pair(x, grad_output)
    groups = rows_by_length(samples, x.shape[-2])

    def between(a: Tensor, b: Tensor) -> Tensor:
        return between_samples(a, b, groups, (a.double().T @ b.double()).square().sum())

    return over_layers(between, x, grad_output)


def between_samples(x: Tensor, y: Tensor, groups: list[Tensor], g: Tensor) -> Tensor:
    """Return D²_SGD from ‖XᵀY‖²_F, for callers that have computed this already.

    g: ‖XᵀY‖²_F, a scalar from a product in float64: if the samples agree, all but its last digits cancel. groups: Of
    :func:`rows_by_length`.
    """
    count = sum(len(index) for index in groups)
    squares = torch.stack([_squared_gradients(x, y, index.to(x.device)) for index in groups]).sum()
    # If all samples have the same gradient, rounding could make the variance negative.
    return ((count * squares - g) / (count - 1)).clamp_min(0)


def rows_by_length(samples: tuple[int, int] | Tensor | None, rows: int) -> list[Tensor]:
    """Return the rows of every sample, grouped by length T: int64 of shape (samples, T)."""
    groups = [torch.arange(rows).unsqueeze(1)] if samples is None else _sequences(samples, rows)
    count = sum(len(index) for index in groups)
    if count < 2:
        raise ValueError(f"The variance between samples needs at least two of them, got {count}.")
    return groups


def _sequences(samples: tuple[int, int] | Tensor, rows: int) -> list[Tensor]:
    if not isinstance(samples, Tensor):
        if len(samples) != 2 or samples[0] * samples[1] != rows:
            raise ValueError(
                f"samples must be (batch, sequence) and multiply to the {rows} rows of x, got {tuple(samples)}."
            )
        return [torch.arange(rows).view(*samples)]
    if samples.shape != (rows,) or samples.dtype != torch.int64:
        raise ValueError(
            f"samples must be int64 with the sequence of each of the {rows} rows of x, got {samples.dtype} of shape "
            f"{tuple(samples.shape)}. Use samples=(batch, sequence) for sequences of one length."
        )
    _, sample, lengths = torch.unique(samples, return_inverse=True, return_counts=True)
    order, first = torch.argsort(sample, stable=True), lengths.cumsum(0) - lengths
    return [
        order[first[lengths == length].unsqueeze(1) + torch.arange(length, device=order.device)]
        for length in lengths.unique().tolist()
    ]


def _squared_gradients(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    """Return Σ_s ‖G_s‖² over samples of one length; ``index`` holds their rows, shape (samples, T)."""
    length, inputs, outputs = index.shape[1], x.shape[1], y.shape[1]
    if length == 1:  # ‖G_s‖² is a product of two norms
        (rows,) = index.unbind(1)
        return x[rows].double().square().sum(1) @ y[rows].double().square().sum(1)
    if length * (inputs + outputs) > inputs * outputs:
        parts = [(x[rows].double().T @ y[rows].double()).square().sum() for rows in index]
    else:
        step = max(1, _ELEMENTS // max(1, length * (length + inputs + outputs)))
        parts = [(_gram(x[rows]) * _gram(y[rows])).sum() for rows in index.split(step)]
    return torch.stack(parts).sum()


def _gram(rows: Tensor) -> Tensor:
    rows = rows.double()
    return torch.bmm(rows, rows.transpose(1, 2))


@without_autocast
def sketch_variance(
    x: Tensor,
    grad_output: Tensor,
    *,
    kind: str,
    rows: int,
    bits: float | None = None,
    block: int | None = None,
    mask: Tensor | None = None,
    probabilities: Tensor | None = None,
    draws: int = 4,
) -> Tensor:
    """Return D²_sketch = E‖dŴ − dW‖² for one layer and batch, or for several layers.

    Exact for ``bits=None``, as derived in each family's module. Symmetric codes (8, 4, 3 bits) add
    E_S Σ_b ‖(SᵀY)_b‖² E‖ẑ_b − z_b‖², whose inner terms are exact for each S and each rotation of the columns, from the
    scales. Normal codes (2, 1.6, 1 bits) have errors that rows may share, and add E ‖Σ_b (SᵀY)_b (ẑ_b − z_b)ᵀ‖². No
    closed form is known for the outer means, which are taken over ``draws`` fixed seeds. Each seed averages over all
    elements, so few suffice for layers of usual size. Use hundreds for K below about 64; :func:`simulate_variance`
    checks the result.

    Cost: two or three products of N·I·O in float64; with ``bits``, also ``draws`` sketches of X and Y.

    Args:
        x: Layer input, shape (N, I), or (L, N, I) for L layers.
        grad_output: Gradient with respect to the layer's output, shape (N, O), or (L, N, O); zero where ``mask`` is
            false.
        kind: One of :data:`rmm_linear.sketches.KINDS`.
        rows: K, at most N.
        bits: 8, 4, 3, 2, 1.6, 1, or None for the dtype itself.
        block: Tokens per block, or None.
        mask: True for valid tokens, shape (N,), the same for all layers; None is all.
        probabilities: Sampling probabilities of the rows for norm_rows and wta, up to a factor, shape (N,), or (L, N);
            see :func:`rmm_linear.sketches.probabilities`. None is ‖x‖ alone with the default ``uniform_mix``, as if
            nothing were known about Y.
        draws: Number of seeds of S over which the rounding term is averaged.

    Returns:
        float64, shape () or (L,), in squared units of the weight gradient. Infinite if a token with a gradient has
        probability 0: dŴ would never contain it.

    Raises:
        ValueError: If an argument is out of range, ``block`` is given to a kind without blocks, ``probabilities`` to
            one that does not sample rows by them, or ``mask`` has another shape than (N,).

    Example:
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [0.5]])
        >>> sketch_variance(x, y, kind="rademacher", rows=1)
        tensor(6.2500, dtype=torch.float64)
    """
    check_pair(x, grad_output)
    check_sketch(x, kind=kind, rows=rows, block=block, mask=mask)
    check_integer("draws", draws)
    if probabilities is not None and probabilities.shape != x.shape[:-1]:
        expected, actual = tuple(x.shape[:-1]), tuple(probabilities.shape)
        raise ValueError(f"probabilities must have the shape {expected} of the rows of x, got {actual}.")
    if mask is not None and block is None and (kind in SAMPLERS or FAMILIES[kind].local):
        valid = mask.bool()  # the variance is the same without masked rows, and less work
        x, grad_output, mask = x[..., valid, :], grad_output[..., valid, :], None
        probabilities = None if probabilities is None else probabilities[..., valid]
    ranks = None if mask is None else TokenMask.of(mask)

    def noise(a: Tensor, b: Tensor, p: Tensor | None = None) -> Tensor:
        p = sampling_probabilities(a, kind, rows, p, ranks)
        total = variance(a, b, kind=kind, rows=rows, block=block, mask=ranks, p=p)
        if bits is None:
            return total
        rounding = torch.zeros_like(total)
        for draw in range(draws):
            seed = torch.full((1,), draw, dtype=torch.int64, device=a.device)
            z = SKETCH(a, kind=kind, seed=seed, rows=rows, block=block, mask=ranks, p=p)
            y = SKETCH(b, kind=kind, seed=seed, rows=rows, block=block, mask=ranks, p=p)
            stored = ENCODE(z, bits, seed)
            if is_normal(bits):
                error = DECODE(*stored, seed, bits, z.shape[1], z.dtype).double() - z.double()
                rounding += (y.double().T @ error).square().sum() / draws
            else:
                added = rounding_variance(stored[1], z.shape[1])
                rounding += (y.double().square().sum(1) * added).sum() / draws
        return total + rounding

    return over_layers(noise, x, grad_output, probabilities)
