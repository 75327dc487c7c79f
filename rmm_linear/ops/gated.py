"""The packed products of a gated MLP, and the operators that make and apply them: see packing/gated.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rmm_linear.ops import triton
from rmm_linear.ops.dispatch import Call, Case, call, into, operation, operator
from rmm_linear.ops.native import gated as native
from rmm_linear.packing import GROUP, WIDTHS
from rmm_linear.packing import gated as plain
from rmm_linear.packing.gated import ACTIVATIONS, Packed, check_factors, stored_parts
from rmm_linear.packing.norms import wide
from rmm_linear.packing.pointwise import Pointwise
from rmm_linear.packing.stored import blank_stored, stored_bytes, views
from rmm_linear.sketches.seeds import fresh_seeds


def _gate_plainly(
    a: Tensor,
    b: Tensor,
    seeds: Tensor,
    activation: str,
    bits: int,
    wanted: tuple[bool, bool],
    index: Tensor | None,
    *,
    out: list[Packed | None] | None = None,
) -> tuple[Tensor, list[Packed | None]]:
    packed = PACK_GATED(a, b, seeds, activation, bits, wanted, index, out=out)
    return Pointwise(activation)(wide(a)).to(a.dtype) * b, packed


def _settings() -> Iterator[tuple[str, int, tuple[bool, bool]]]:
    """Return every activation, width, and choice of the products."""
    for place, activation in enumerate(ACTIVATIONS):
        yield activation, WIDTHS[place % 3], ((True, True), (True, False), (False, True), (True, True))[place]


def _pack_samples(case: Case) -> Iterator[Call]:
    for activation, bits, wanted in _settings():
        yield call(3 * case.matrix(), case.matrix(1), torch.tensor([77, -5]), activation, bits, wanted, case.index)


def _apply_samples(case: Case) -> Iterator[Call]:
    for (a, b, seeds, activation, bits, wanted, index), _ in _pack_samples(case):
        packed = plain.pack_gated(a, b, seeds, activation, bits, wanted, index)
        yield call(case.matrix(2), seeds, packed, bits, index)


# In C and in the kernels the products themselves differ by 2⁻²² or so, and more than that near 0.
PACK_GATED = operation(
    "PACK_GATED", into(plain.pack_gated), into(native.pack_gated), triton.pack_gated, _pack_samples, moved=0.01
)
APPLY_GATED = operation("APPLY_GATED", plain.apply_gated, native.apply_gated, triton.apply_gated, _apply_samples)
GATE = operation("GATE", _gate_plainly, None, triton.gate, _pack_samples, moved=0.01)


def _operator_samples(case: Case) -> Iterator[Call]:
    for activation, bits, wanted in _settings():
        yield call(3 * case.matrix(), case.matrix(1), activation, bits, case.seed, case.index, *wanted)


def _backward_samples(case: Case) -> Iterator[Call]:
    for (a, b, activation, bits, seed, index, *wanted), _ in _operator_samples(case):
        stored = keep_gated.function(a, b, activation, bits, seed, index, *wanted)
        yield call(case.matrix(2), stored, bits, index, *wanted)


def _packing_flops(shape: Sequence[int], *_: object) -> int:
    """Return the operations of two rotations."""
    return 2 * 2 * GROUP * math.prod(shape)


@operator("keep_gated", samples=_operator_samples, flops=_packing_flops, native=native.stored_gated)
def keep_gated(
    a: Tensor,
    b: Tensor,
    activation: str,
    bits: int,
    seed: int | None,
    index: Tensor | None,
    needs_a: bool,
    needs_b: bool,
) -> Tensor:
    """Pack what a gated MLP saves: b · act'(a) where ``needs_a``, act(a) where ``needs_b``, and their seeds.

    a, b: Floating point, shape (N, C), one dtype. activation: One of :data:`rmm_linear.packing.gated.ACTIVATIONS`.
    index: Rows to store, int64, shape (n,); None for all. Returns the bytes of
    :func:`rmm_linear.packing.gated.stored_parts`.
    """
    check_factors(a, b)
    rows, columns = a.shape[0] if index is None else index.shape[0], a.shape[1]
    parts = stored_parts(rows, columns, bits, needs_a + needs_b)
    stored = blank_stored(a, parts)
    place, *tensors = views(stored, parts)
    out = _packed(tensors, needs_a, needs_b)
    PACK_GATED(a, b, fresh_seeds(place, seed), activation, bits, (needs_a, needs_b), index, out=out)
    return stored


def _packed(tensors: Sequence[Tensor], needs_a: bool, needs_b: bool) -> list[Packed | None]:
    """Return codes and scales of both products, None where one is not stored."""
    pairs = iter([Packed(*tensors[place : place + 2]) for place in range(0, len(tensors), 2)])
    return [next(pairs) if needed else None for needed in (needs_a, needs_b)]


@keep_gated.register_fake
def _(a, b, activation, bits, seed, index, needs_a, needs_b):
    rows = a.shape[0] if index is None else index.shape[0]
    return a.new_empty(stored_bytes(stored_parts(rows, a.shape[1], bits, needs_a + needs_b)), dtype=torch.uint8)


def _as_tensors(found: tuple[Tensor | None, Tensor | None], y: Tensor) -> tuple[Tensor, Tensor]:
    first, second = (y.new_empty(0) if one is None else one for one in found)
    return first, second


@operator(
    "apply_gated",
    "(Tensor y, Tensor stored, int bits, Tensor? index, bool needs_a, bool needs_b) -> (Tensor, Tensor)",
    samples=_backward_samples,
    flops=_packing_flops,
    registered=lambda function, y, *how: _as_tensors(function(y, *how), y),
    native=native.apply_stored,
)
def _apply(
    y: Tensor, stored: Tensor, bits: int, index: Tensor | None, needs_a: bool, needs_b: bool
) -> tuple[Tensor | None, Tensor | None]:
    rows, columns = y.shape[0] if index is None else index.shape[0], y.shape[1]
    seeds, *tensors = views(stored, stored_parts(rows, columns, bits, needs_a + needs_b))
    first, second = APPLY_GATED(y, seeds, _packed(tensors, needs_a, needs_b), bits, index)
    return first, second


@_apply.register_fake
def _(y, stored, bits, index, needs_a, needs_b):
    return tuple(y.new_empty(y.shape if needed else (0,)) for needed in (needs_a, needs_b))


def apply_gated(
    y: Tensor, stored: Tensor, bits: int, index: Tensor | None, needs_a: bool, needs_b: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients with respect to a and b from what :func:`keep_gated` saved; None where not needed.

    y: Gradient with respect to act(a) · b, shape (N, C). Rows that are not in ``index`` get zeros.
    """
    first, second = _apply(y, stored, bits, index, needs_a, needs_b)
    return first if needs_a else None, second if needs_b else None


def gated_scales(stored: Tensor, rows: int, columns: int, bits: int, *needs: bool) -> list[Tensor]:
    """Return the scales of what :func:`keep_gated` saved, of the products that are there."""
    return views(stored, stored_parts(rows, columns, bits, sum(needs)))[2::2]


@operator("gate_and_pack", samples=_operator_samples, flops=lambda a, *_: _packing_flops(a) + 2 * math.prod(a))
def gate_and_pack(
    a: Tensor,
    b: Tensor,
    activation: str,
    bits: int,
    seed: int | None,
    index: Tensor | None,
    needs_a: bool,
    needs_b: bool,
) -> tuple[Tensor, Tensor]:
    """Compute act(a) · b, and pack what a gated MLP saves.

    Arguments as for :func:`keep_gated`; the rows of ``index`` are distinct. Returns act(a), rounded to the dtype of
    ``a``, times b, shape (N, C), contiguous; and the bytes of ``keep_gated``.
    """
    check_factors(a, b)
    parts = stored_parts(len(a) if index is None else len(index), a.shape[1], bits, needs_a + needs_b)
    stored = blank_stored(a, parts)
    place, *tensors = views(stored, parts)
    out = _packed(tensors, needs_a, needs_b)
    output, _ = GATE(a, b, fresh_seeds(place, seed), activation, bits, (needs_a, needs_b), index, out=out)
    return output.contiguous(), stored


@gate_and_pack.register_fake
def _(a, b, activation, bits, seed, index, needs_a, needs_b):
    rows = a.shape[0] if index is None else index.shape[0]
    parts = stored_parts(rows, a.shape[1], bits, needs_a + needs_b)
    return a.new_empty(a.shape), a.new_empty(stored_bytes(parts), dtype=torch.uint8)
