"""SᵀM and the exact variance, for every kind, with and without a token mask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rmm_linear.sketches.masks import TokenMask
from rmm_linear.sketches.philox import Generator, philox
from rmm_linear.sketches.registry import FAMILIES, SAMPLERS, kept_rows
from rmm_linear.sketches.rows import random_keys
from rmm_linear.sketches.sampling import gather, probabilities, row_norms, sample_rows
from rmm_linear.sketches.sampling import variance as sampling_variance


def sketch(
    matrix: Tensor,
    *,
    kind: str,
    seed: Tensor,
    rows: int,
    block: int | None = None,
    mask: TokenMask | None = None,
    p: Tensor | None = None,
    generator: Generator = philox,
) -> Tensor:
    """Return SᵀM for the S of a kind and a seed: shape (:func:`kept_rows`, D), dtype of M.

    If all tokens fit into K rows (K ≥ N, or K ≥ n valid tokens with a mask), the result is their rows, unchanged.

    matrix: M, shape (N, D), floating point. seed: int64 with one element, on the device of ``matrix``. block: Tokens
    per block of a block-diagonal S (gaussian, rademacher, hadamard); None mixes all tokens. mask: The valid tokens; the
    others are left out of S. p: Probability of every token, by which the kinds of :data:`SAMPLERS` sample rows; see
    :func:`probabilities`.
    """
    tokens = matrix.shape[0]
    sketch_rows = kept_rows(tokens, rows, block)
    if mask is None and sketch_rows >= tokens:
        return matrix
    if kind in SAMPLERS and sketch_rows < tokens:
        keys = random_keys(seed, rows, generator)
        return gather(matrix, sample_rows(_required(p, kind), keys, SAMPLERS[kind], mask))
    if matrix.device.type == "cpu":
        return sketch_parts(matrix, kind=kind, seed=seed, rows=rows, block=block, mask=mask, generator=generator)(
            0, sketch_rows
        )
    if mask is None:
        return FAMILIES[kind].sketch(matrix, seed, rows, block, None, generator)
    compact = mask.compact(matrix)
    if sketch_rows >= tokens:
        return compact
    family = FAMILIES[kind]
    sketched = family.sketch(compact, seed, rows, block, mask.count, generator)
    return torch.where(mask.count <= sketch_rows, compact[:sketch_rows], sketched)


def sketch_parts(
    matrix: Tensor,
    *,
    kind: str,
    seed: Tensor,
    rows: int,
    block: int | None = None,
    mask: TokenMask | None = None,
    generator: Generator = philox,
) -> Callable[[int, int], Tensor]:
    """Return a function of ``begin`` and ``end`` that makes these rows of :func:`sketch`'s result, on CPU."""
    tokens = matrix.shape[0]
    sketch_rows = kept_rows(tokens, rows, block)
    if mask is None and sketch_rows >= tokens:
        return lambda begin, end: matrix[begin:end]
    if kind in SAMPLERS and sketch_rows < tokens:
        _required(None, kind)
    count = tokens if mask is None else mask.valid_count
    if mask is not None and count <= sketch_rows:
        order = mask.order[:count]

        def valid_rows(begin: int, end: int) -> Tensor:
            valid = matrix.index_select(0, order[begin:end])
            return torch.cat((valid, valid.new_zeros(end - begin - len(valid), valid.shape[1])))

        return valid_rows
    family = FAMILIES[kind]
    if mask is not None and family.local and (block is None or block >= tokens):
        matrix, mask = matrix.index_select(0, mask.order[:count]), None
    if mask is None and family.part is not None:
        return family.part(matrix, seed, rows, generator)
    if mask is None:
        whole = family.sketch(matrix, seed, rows, block, None, generator)
    else:
        whole = family.sketch(mask.compact(matrix), seed, rows, block, mask.count, generator)
    return lambda begin, end: whole[begin:end]


def _required(p: Tensor | None, kind: str) -> Tensor:
    if p is None:
        raise ValueError(
            f"kind={kind!r} samples rows by the probabilities p of the tokens, so its sketch does not follow from a "
            "seed alone. Pass p=probabilities(row_norms(x))."
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
    """Return E‖dŴ − dW‖² of the sketched gradient exactly, as derived in each family's module, a float64 scalar.

    x: Layer input, shape (N, I). y: Gradient with respect to the layer's output, shape (N, O); zero where the mask is
    false. p: Probability of every token, shape (N,), for the kinds of :data:`SAMPLERS`; None uses ‖xᵢ‖ alone.
    """
    tokens = x.shape[0]
    sketch_rows = kept_rows(tokens, rows, block)
    if sketch_rows >= tokens or (mask is not None and mask.valid_count <= sketch_rows):
        return x.new_zeros((), dtype=torch.float64)
    if kind in SAMPLERS:
        p = probabilities(row_norms(x), mask=mask) if p is None else p
        valid = slice(None) if mask is None else mask.valid
        return sampling_variance(x[valid], y[valid], p[valid], rows, SAMPLERS[kind])
    if mask is None:
        return FAMILIES[kind].variance(x, y, rows, block, None)
    return FAMILIES[kind].variance(mask.compact(x), mask.compact(y), rows, block, mask.count)
