"""Rows sampled by their importance: which they are, the rows themselves, and those packed.

A sample is saved and not made again, so the backward pass needs neither X nor what was expected of Y.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from rmm_linear.ops import table
from rmm_linear.sketches import SAMPLERS, RowSample, TokenMask
from rmm_linear.spec import SaveSpec


def sample_rows(
    x: Tensor, seed: Tensor, spec: SaveSpec, expected: Tensor | None = None, mask: TokenMask | None = None
) -> RowSample:
    """Sample K rows of an input by what they weigh; :mod:`rmm_linear.sketches.sampling` says how.

    Args:
        x: Input X, shape (N, I), floating point.
        seed: int64, shape (1,), on the device of ``x``.
        spec: Kind, rows (K, less than N), and the part of the probability that all tokens share alike.
        expected: ŷ, what is expected of ‖yᵢ‖, shape (N,); None where nothing is known.
        mask: The tokens that count, or None for all.

    Returns:
        Rows, int32, and their scales, float32, both of shape (K,).

    Raises:
        ValueError: If kind, rows or uniform_mix is out of range, or ``expected`` has another shape.
    """
    if spec.kind not in SAMPLERS:
        raise ValueError(
            f"sample_rows needs one of {', '.join(SAMPLERS)}, got kind={spec.kind!r}. Use sketch for the others."
        )
    if not 1 <= spec.rows < x.shape[0]:
        raise ValueError(
            f"rows must be at least 1 and less than the {x.shape[0]} tokens, got {spec.rows}. Keep them all."
        )
    if not 0 < spec.uniform_mix <= 1:
        raise ValueError(
            f"uniform_mix must be in (0, 1], got {spec.uniform_mix}. A token that is never sampled would be missing."
        )
    if expected is not None and expected.shape != x.shape[:1]:
        raise ValueError(f"expected must have one number per token, ({x.shape[0]},), got {tuple(expected.shape)}.")
    return table.SAMPLE_ROWS.choose(x, seed)(x, seed, spec, expected, mask)


def gather_rows(matrix: Tensor, sample: RowSample) -> Tensor:
    """Return SᵀM for sampled rows.

    Args:
        matrix: M, shape (N, D), floating point.
        sample: Rows, int32, and scales, float32, shape (K,). Where the scale is 0, so is the result, whatever the row
            holds.

    Returns:
        Shape (K, D), dtype of ``matrix``.
    """
    return table.GATHER_ROWS.choose(matrix)(matrix, sample)


def packed_rows(matrix: Tensor, seed: Tensor, sample: RowSample, bits: int) -> tuple[Tensor, Tensor]:
    """Return pack(SᵀM) for sampled rows, made in one go: on CPU in parts, in a kernel before it is stored.

    Args:
        matrix: M, shape (N, D), floating point.
        seed: int64, shape (1,), on the device of ``matrix``; of the rounding.
        sample: Rows and scales, shape (K,).
        bits: 8, 4 or 2.

    Returns:
        Codes and qparams, see :func:`rmm_linear.packing.pack`.
    """
    return table.PACKED_ROWS.choose(matrix, seed)(matrix, seed, sample, bits)


@torch.library.custom_op("rmm_linear::gather_rows", mutates_args=())
def _gather_rows(matrix: Tensor, index: Tensor, scale: Tensor) -> Tensor:
    return gather_rows(matrix, RowSample(index, scale))


@_gather_rows.register_fake
def _(matrix, index, scale):
    return matrix.new_empty(index.shape[0], matrix.shape[1])


def gather_rows_operator(matrix: Tensor, sample: RowSample) -> Tensor:
    """Do what :func:`gather_rows` does as an operator, which PyTorch counts and traces.

    Args:
        matrix: See there.
        sample: See there.

    Returns:
        SᵀM.
    """
    return _gather_rows(matrix, *sample)


@register_flop_formula(torch.ops.rmm_linear.gather_rows)
def _(matrix: Sequence[int], index: Sequence[int], *arguments, out_shape=None, **named) -> int:
    return index[0] * matrix[1]
