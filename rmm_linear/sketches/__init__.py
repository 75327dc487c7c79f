"""Families of sketches S (N, K): unbiased, drawn from one seed, with their exact variance.

A sketch is a linear map M (N, D) → SᵀM (K, D). It follows from its seed alone, through counter-based random numbers, so
the forward pass can sketch X, the backward pass Y, and a kernel on another device either, all with the same S.

Source: Bershatsky et al. 2022, arXiv 2201.13195 (gaussian, rademacher, dct, dft). The variances are derived in each
family's module; they differ from the ones stated there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rmm_linear.sketches.countsketch import COUNTSKETCH
from rmm_linear.sketches.dense import GAUSSIAN, RADEMACHER, block_rows
from rmm_linear.sketches.family import Family, Moments
from rmm_linear.sketches.masks import TokenMask
from rmm_linear.sketches.rows import ROWS
from rmm_linear.sketches.transforms import DCT, DFT, HADAMARD

FAMILIES: dict[str, Family] = {
    family.name: family for family in (COUNTSKETCH, ROWS, RADEMACHER, GAUSSIAN, HADAMARD, DCT, DFT)
}
KINDS: tuple[str, ...] = tuple(FAMILIES)


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
    matrix: Tensor, *, kind: str, seed: Tensor, rows: int, block: int | None = None, mask: TokenMask | None = None
) -> Tensor:
    """Return SᵀM for the S that ``kind`` draws from ``seed``.

    Where K rows hold every token (K ≥ N, or K ≥ n with a mask) they are the tokens' rows themselves.

    Args:
        matrix: M, shape (N, D), floating point.
        kind: One of :data:`KINDS`.
        seed: int64 with one element, on the device of ``matrix``.
        rows: K, at least 1.
        block: Tokens per block of a block-diagonal S (gaussian and rademacher); None mixes all tokens.
        mask: The tokens that count; the others are left out of S. None is all.

    Returns:
        Shape (:func:`kept_rows`, D), dtype of ``matrix``.

    Example:
        >>> import torch
        >>> m = torch.ones(8, 3)
        >>> sketch(m, kind="rows", seed=torch.tensor(0), rows=2)
        tensor([[2., 2., 2.],
                [2., 2., 2.]])
    """
    tokens, family = matrix.shape[0], FAMILIES[kind]
    kept = kept_rows(tokens, rows, block)
    if mask is None and kept >= tokens:
        return matrix
    if matrix.device.type == "cpu":
        return sketch_parts(matrix, kind=kind, seed=seed, rows=rows, block=block, mask=mask)(0, kept)
    if mask is None:
        return family.sketch(matrix, seed, rows, block, None)
    compact = mask.compact(matrix)
    if kept >= tokens:
        return compact
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
    """
    tokens, family = matrix.shape[0], FAMILIES[kind]
    kept = kept_rows(tokens, rows, block)
    if mask is None and kept >= tokens:
        return lambda begin, end: matrix[begin:end]
    count = tokens if mask is None else int(mask.count)
    if mask is not None and count <= kept:
        order = mask.order[:count]

        def gather(begin: int, end: int) -> Tensor:
            real = matrix.index_select(0, order[begin:end])
            return torch.cat((real, real.new_zeros(end - begin - len(real), real.shape[1])))

        return gather
    if mask is not None and family.local and (block is None or block >= tokens):
        matrix, mask = matrix.index_select(0, mask.order[:count]), None
    if mask is None and family.part is not None:
        return family.part(matrix, seed, rows)
    if mask is None:
        whole = family.sketch(matrix, seed, rows, block, None)
    else:
        whole = family.sketch(mask.compact(matrix), seed, rows, block, mask.count)
    return lambda begin, end: whole[begin:end]


def variance(
    x: Tensor, y: Tensor, *, kind: str, rows: int, block: int | None = None, mask: TokenMask | None = None
) -> Tensor:
    """Return E‖dŴ − dW‖² of the sketched gradient exactly, as derived in each family's module.

    Args:
        x: Layer input, shape (N, I).
        y: Gradient by the layer output, shape (N, O); zero where the mask is false.
        kind: One of :data:`KINDS`.
        rows: K, at least 1.
        block: Tokens per block, or None.
        mask: The tokens that count. None is all.

    Returns:
        float64 scalar.
    """
    tokens = x.shape[0]
    kept = kept_rows(tokens, rows, block)
    if kept >= tokens or (mask is not None and int(mask.count) <= kept):
        return x.new_zeros((), dtype=torch.float64)
    if mask is None:
        return FAMILIES[kind].variance(x, y, rows, block, None)
    return FAMILIES[kind].variance(mask.compact(x), mask.compact(y), rows, block, mask.count)


__all__ = ["FAMILIES", "KINDS", "Family", "Moments", "TokenMask", "kept_rows", "sketch", "sketch_parts", "variance"]
