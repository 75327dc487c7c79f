"""What the kinds that draw rows by their weight are made of: which rows, the rows themselves, and those packed.

A draw is stored and not made again, so the backward pass needs neither X nor what was expected of Y.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from rmm_linear.backends import triton as _triton
from rmm_linear.packing import pack as packing
from rmm_linear.sketches import SAMPLERS, Drawn, TokenMask, draw, gather, probabilities, random_keys, row_norms


def draw_rows(
    x: Tensor,
    seed: Tensor,
    kind: str,
    rows: int,
    uniform_mix: float,
    expected: Tensor | None = None,
    order: Tensor | None = None,
    count: Tensor | None = None,
) -> Drawn:
    """Draw K rows of an input by what they weigh; :mod:`rmm_linear.sketches.sampling` says how.

    Args:
        x: Input X, shape (N, I), floating point.
        seed: int64, shape (1,), on the device of ``x``.
        kind: One of :data:`rmm_linear.sketches.SAMPLERS`.
        rows: K, less than N.
        uniform_mix: Part of the probability that all tokens share alike, in (0, 1].
        expected: ŷ, what is expected of ‖yᵢ‖, shape (N,); None where nothing is known.
        order: See :class:`rmm_linear.sketches.TokenMask`.
        count: See there.

    Returns:
        Rows, int32, and their scales, float32, both of shape (K,).

    Raises:
        ValueError: If ``kind``, ``rows`` or ``uniform_mix`` is out of range, or ``expected`` has another shape.
    """
    if kind not in SAMPLERS:
        raise ValueError(f"draw_rows needs one of {', '.join(SAMPLERS)}, got kind={kind!r}. Use sketch for the others.")
    if not 1 <= rows < x.shape[0]:
        raise ValueError(f"rows must be at least 1 and less than the {x.shape[0]} tokens, got {rows}. Keep them all.")
    if not 0 < uniform_mix <= 1:
        raise ValueError(
            f"uniform_mix must be in (0, 1], got {uniform_mix}. A token that is never drawn would be missing."
        )
    if expected is not None and expected.shape != x.shape[:1]:
        raise ValueError(f"expected must have one number per token, ({x.shape[0]},), got {tuple(expected.shape)}.")
    if _triton.applies_to(x):
        norms, keys = _triton.kernels().row_norms(x), _triton.kernels().random_keys(seed, rows)
    else:
        norms, keys = row_norms(x), random_keys(seed, rows)
    mask = TokenMask.made_of(order, count)
    return draw(probabilities(norms, uniform_mix, expected, mask), keys, SAMPLERS[kind], mask)


def make_rows(matrix: Tensor, index: Tensor, scale: Tensor) -> Tensor:
    """Return SᵀM for rows that were drawn.

    Args:
        matrix: M, shape (N, D), floating point.
        index: Rows, int32, shape (K,).
        scale: Their scales, float32, shape (K,). Where it is 0, so is the result, whatever the row holds.

    Returns:
        Shape (K, D), dtype of ``matrix``.
    """
    if _triton.applies_to(matrix):
        return _triton.kernels().sparse_sketch(matrix, None, len(index), index=index, scale=scale)
    return gather(matrix, Drawn(index, scale))


gather_rows = torch.library.custom_op("rmm_linear::gather_rows", make_rows, mutates_args=())


@gather_rows.register_fake
def _(matrix, index, scale):
    return matrix.new_empty(index.shape[0], matrix.shape[1])


def packed_rows(matrix: Tensor, seed: Tensor, index: Tensor, scale: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return pack(SᵀM) for rows that were drawn, made in one go: on CPU in parts, in a kernel before it is stored.

    Args:
        matrix: M, shape (N, D), floating point.
        seed: int64, shape (1,), on the device of ``matrix``; of the rounding.
        index: Rows, int32, shape (K,).
        scale: Their scales, float32, shape (K,).
        bits: 8, 4 or 2.

    Returns:
        Codes and ranges, see :func:`rmm_linear.packing.pack.pack`.
    """
    if _triton.applies_to(matrix):
        return _triton.kernels().sparse_sketch(matrix, seed, len(index), index=index, scale=scale, bits=bits)

    def part(begin: int, end: int) -> Tensor:
        return gather(matrix, Drawn(index[begin:end], scale[begin:end]))

    return packing.pack_parts(part, (len(index), matrix.shape[1]), bits, seed)


@register_flop_formula(torch.ops.rmm_linear.gather_rows)
def _(matrix: Sequence[int], index: Sequence[int], *args, out_shape=None, **kwargs) -> int:
    return index[0] * matrix[1]
