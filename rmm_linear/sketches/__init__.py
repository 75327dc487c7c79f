"""Families of sketches S (N, K): unbiased, drawn from one seed, with their exact variance.

A sketch is a linear map M (N, D) → SᵀM (K, D). As a rule it follows from its seed alone, through counter-based random
numbers, so the forward pass can sketch X, the backward pass Y, and a kernel on another device either, all with the same
S. These kinds are :data:`FAMILIES`. The kinds of :data:`SAMPLERS` draw rows by what X weighs, so that S is drawn once,
for X, and stored.

Source: Bershatsky et al. 2022, arXiv 2201.13195 (gaussian, rademacher, dct, dft), Liu et al. 2023, arXiv 2305.15265
(norm_rows, wta). The variances are derived in each family's module; they differ from the ones stated by the first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rmm_linear.sketches.blocks import block_rows
from rmm_linear.sketches.countsketch import COUNTSKETCH
from rmm_linear.sketches.dense import GAUSSIAN, RADEMACHER
from rmm_linear.sketches.family import Family, Moments
from rmm_linear.sketches.masks import TokenMask
from rmm_linear.sketches.rows import ROWS, random_keys
from rmm_linear.sketches.sampling import (
    NORM_ROWS,
    UNIFORM_MIX,
    WTA,
    Drawn,
    Sampler,
    draw,
    gather,
    probabilities,
    row_norms,
)
from rmm_linear.sketches.sampling import variance as sampling_variance
from rmm_linear.sketches.transforms import DCT, DFT, HADAMARD

FAMILIES: dict[str, Family] = {
    family.name: family for family in (COUNTSKETCH, ROWS, RADEMACHER, GAUSSIAN, HADAMARD, DCT, DFT)
}
SAMPLERS: dict[str, Sampler] = {sampler.name: sampler for sampler in (WTA, NORM_ROWS)}
KINDS: tuple[str, ...] = (*FAMILIES, *SAMPLERS)


def has_blocks(kind: str) -> bool:
    """Say whether a kind can be block-diagonal.

    Args:
        kind: One of :data:`KINDS`.

    Returns:
        Whether ``block`` means something to it.
    """
    return kind in FAMILIES and FAMILIES[kind].blocks


def kept_rows(tokens: int, rows: int, block: int | None = None) -> int:
    """Return the rows a sketch really has: with ``block``, rounded up to a whole number per block.

    Args:
        tokens: N.
        rows: K asked for.
        block: Tokens per block, or None.

    Returns:
        K; N when every row is stored.
    """
    if rows >= tokens or block is None:
        return min(rows, tokens)
    _, blocks, rows_per_block = block_rows(tokens, rows, block)
    return min(blocks * rows_per_block, tokens)


def sketch(
    matrix: Tensor,
    *,
    kind: str,
    seed: Tensor,
    rows: int,
    block: int | None = None,
    mask: TokenMask | None = None,
    p: Tensor | None = None,
) -> Tensor:
    """Return SᵀM for the S that ``kind`` draws from ``seed``.

    Where K rows hold every token (K ≥ N, or K ≥ n with a mask) they are the tokens' rows themselves.

    Args:
        matrix: M, shape (N, D), floating point.
        kind: One of :data:`KINDS`.
        seed: int64 with one element, on the device of ``matrix``.
        rows: K, at least 1.
        block: Tokens per block of a block-diagonal S (gaussian, rademacher, hadamard); None mixes all tokens.
        mask: The tokens that count; the others are left out of S. None is all.
        p: Probability of every token, see :func:`probabilities`, which the kinds of :data:`SAMPLERS` draw rows by.

    Returns:
        Shape (:func:`kept_rows`, D), dtype of ``matrix``.

    Raises:
        ValueError: If the kind is one of :data:`SAMPLERS`, there are rows to draw, and ``p`` is None.

    Example:
        >>> import torch
        >>> m = torch.ones(8, 3)
        >>> sketch(m, kind="rows", seed=torch.tensor(0), rows=2)
        tensor([[2., 2., 2.],
                [2., 2., 2.]])
    """
    tokens = matrix.shape[0]
    kept = kept_rows(tokens, rows, block)
    if mask is None and kept >= tokens:
        return matrix
    if kind in SAMPLERS and kept < tokens:
        return gather(matrix, draw(_given(p, kind), random_keys(seed, rows), SAMPLERS[kind], mask))
    if matrix.device.type == "cpu":
        return sketch_parts(matrix, kind=kind, seed=seed, rows=rows, block=block, mask=mask)(0, kept)
    if mask is None:
        return FAMILIES[kind].sketch(matrix, seed, rows, block, None)
    compact = mask.compact(matrix)
    if kept >= tokens:
        return compact
    family = FAMILIES[kind]
    return torch.where(mask.count <= kept, compact[:kept], family.sketch(compact, seed, rows, block, mask.count))


def sketch_parts(
    matrix: Tensor, *, kind: str, seed: Tensor, rows: int, block: int | None = None, mask: TokenMask | None = None
) -> Callable[[int, int], Tensor]:
    """Prepare to make some rows of SᵀM after others, on CPU, so that it need never exist as a whole.

    Args:
        matrix: M, shape (N, D), floating point, on CPU.
        kind: One of :data:`KINDS`.
        seed: int64 with one element.
        rows: K, at least 1.
        block: Tokens per block, or None.
        mask: The tokens that count, or None.

    Returns:
        What makes the rows from one number up to another; together they are the result of :func:`sketch`.

    Raises:
        ValueError: If the kind is one of :data:`SAMPLERS` and there are rows to draw: that is for :func:`sketch`.
    """
    tokens = matrix.shape[0]
    kept = kept_rows(tokens, rows, block)
    if mask is None and kept >= tokens:
        return lambda begin, end: matrix[begin:end]
    if kind in SAMPLERS and kept < tokens:
        _given(None, kind)
    count = tokens if mask is None else int(mask.count)
    if mask is not None and count <= kept:
        order = mask.order[:count]

        def gather(begin: int, end: int) -> Tensor:
            real = matrix.index_select(0, order[begin:end])
            return torch.cat((real, real.new_zeros(end - begin - len(real), real.shape[1])))

        return gather
    family = FAMILIES[kind]
    if mask is not None and family.local and (block is None or block >= tokens):
        matrix, mask = matrix.index_select(0, mask.order[:count]), None
    if mask is None and family.part is not None:
        return family.part(matrix, seed, rows)
    if mask is None:
        whole = family.sketch(matrix, seed, rows, block, None)
    else:
        whole = family.sketch(mask.compact(matrix), seed, rows, block, mask.count)
    return lambda begin, end: whole[begin:end]


def _given(p: Tensor | None, kind: str) -> Tensor:
    if p is None:
        raise ValueError(
            f"kind={kind!r} draws rows by the probabilities p of the tokens, so its sketch does not follow from a seed "
            "alone. Pass p=probabilities(row_norms(x))."
        )
    return p


def variance(
    x: Tensor,
    y: Tensor,
    *,
    kind: str,
    rows: int,
    block: int | None = None,
    mask: TokenMask | None = None,
    p: Tensor | None = None,
) -> Tensor:
    """Return E‖dŴ − dW‖² of the sketched gradient exactly, as derived in each family's module.

    Args:
        x: Layer input, shape (N, I).
        y: Gradient by the layer output, shape (N, O); zero where the mask is false.
        kind: One of :data:`KINDS`.
        rows: K, at least 1.
        block: Tokens per block, or None.
        mask: The tokens that count. None is all.
        p: Probability of every token, shape (N,), for the kinds of :data:`SAMPLERS`; None is that of ‖x‖ alone.

    Returns:
        float64 scalar.
    """
    tokens = x.shape[0]
    kept = kept_rows(tokens, rows, block)
    if kept >= tokens or (mask is not None and int(mask.count) <= kept):
        return x.new_zeros((), dtype=torch.float64)
    if kind in SAMPLERS:
        p = probabilities(row_norms(x), mask=mask) if p is None else p
        real = slice(None) if mask is None else mask.real
        return sampling_variance(x[real], y[real], p[real], rows, SAMPLERS[kind])
    if mask is None:
        return FAMILIES[kind].variance(x, y, rows, block, None)
    return FAMILIES[kind].variance(mask.compact(x), mask.compact(y), rows, block, mask.count)


__all__ = [
    "FAMILIES",
    "KINDS",
    "SAMPLERS",
    "UNIFORM_MIX",
    "Drawn",
    "Family",
    "Moments",
    "Sampler",
    "TokenMask",
    "draw",
    "gather",
    "has_blocks",
    "kept_rows",
    "probabilities",
    "random_keys",
    "row_norms",
    "sketch",
    "sketch_parts",
    "variance",
]
