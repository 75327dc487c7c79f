"""Derivatives of pointwise functions in few bits, and the operators that make and apply them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rmm_linear.ops import triton
from rmm_linear.ops.dispatch import Call, Case, call, operation, operator
from rmm_linear.ops.native import derivatives as native
from rmm_linear.ops.sketches import PACK, UNPACK
from rmm_linear.packing import WIDTHS
from rmm_linear.packing import derivatives as plain
from rmm_linear.packing.derivatives import stored_layout, stored_parts
from rmm_linear.packing.norms import wide
from rmm_linear.packing.pointwise import FUNCTIONS, Pointwise
from rmm_linear.packing.stored import blank_stored, stored_bytes, views
from rmm_linear.sketches.seeds import fresh_seed, written


def _pack_plainly(
    x: Tensor, codes: Tensor, function: Pointwise, bits: int, seed: Tensor | None, index: Tensor | None
) -> None:
    codes.copy_(plain.pack_derivative(x, function, bits, seed, index))


def _activate_plainly(
    x: Tensor, codes: Tensor, function: Pointwise, bits: int, seed: Tensor | None, index: Tensor | None
) -> Tensor:
    PACK_DERIVATIVE(x, codes, function, bits, seed, index)
    return function(wide(x)).to(x.dtype)


def _square_plainly(
    x: Tensor, bits: int, seed: Tensor, index: Tensor | None, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    kept = torch.relu(x)
    rows = kept if index is None else kept.index_select(0, index)
    return wide(kept).square().to(x.dtype), *PACK(rows, bits, seed, out=out)


def _functions() -> Iterator[tuple[Pointwise, int]]:
    """Return every function, and widths that it has."""
    parameters = {
        "elu": (1.7,),
        "leaky_relu": (0.1,),
        "hardtanh": (-0.5, 6.0),
    }  # ELU's with a jump of its derivative at 0
    for place, name in enumerate(FUNCTIONS):
        function = Pointwise(name, parameters.get(name, ()))
        yield from ((function, bits) for bits in {function.bits(2), function.bits((8, 4, 1)[place % 3])})


def _pack_samples(case: Case) -> Iterator[Call]:
    x, rows = 3 * case.matrix(), case.rows if case.index is None else len(case.index)
    for function, bits in _functions():
        if function.is_bounded:
            codes = torch.full((rows, (case.columns * bits + 7) // 8), 255, dtype=torch.uint8)
            yield call(x, codes, function, bits, None if function.is_exact else case.seeds, case.index)


def _apply_samples(case: Case) -> Iterator[Call]:
    for (x, codes, *how), _ in _pack_samples(case):
        codes.copy_(plain.pack_derivative(x, *how))
        yield call(case.matrix(1), codes, *how)


def _square_samples(case: Case) -> Iterator[Call]:
    for bits in WIDTHS:
        yield call(case.matrix(), bits, case.seeds, case.index)


PACK_DERIVATIVE = operation(
    "PACK_DERIVATIVE",
    _pack_plainly, native.pack_derivative, triton.pack_derivative, _pack_samples, moved=0.01,
)  # fmt: skip
APPLY_DERIVATIVE = operation(
    "APPLY_DERIVATIVE", plain.apply_derivative, native.apply_derivative, triton.apply_derivative, _apply_samples
)
ACTIVATE = operation("ACTIVATE", _activate_plainly, None, triton.activate, _pack_samples, moved=0.01)
SQUARE = operation("SQUARE", _square_plainly, None, triton.square, _square_samples, moved=0.002)


def _operator_samples(case: Case) -> Iterator[Call]:
    for function, bits in _functions():
        yield call(3 * case.matrix(), case.index, case.seed, function.name, list(function.parameters), bits)


def _backward_samples(case: Case) -> Iterator[Call]:
    for (x, index, *how), _ in _operator_samples(case):
        yield call(case.matrix(1), pack_derivative.function(x, index, *how), index, *how[1:])


@operator(
    "pack_derivative",
    "(Tensor x, Tensor? index, SymInt? seed, str name, float[] parameters, int bits) -> Tensor",
    samples=_operator_samples,
    flops=lambda x, *_: math.prod(x),
    native=native.stored_derivative,
    is_repeated=True,
)
def pack_derivative(
    x: Tensor, index: Tensor | None, seed: int | None, name: str, parameters: Sequence[float], bits: int
) -> Tensor:
    """Save the derivative of a pointwise function in few bits.

    x: Input of the function, shape (N, C). index: Rows to store, int64, shape (n,); None for all. bits: 8, 4, 2 or 1; 1
    for functions that are exact in one bit, at least 2 for "relu_squared". Returns the bytes of :func:`stored_parts`.
    """
    rows, columns = x.shape
    function, parts = stored_layout(name, tuple(parameters), bits, rows if index is None else index.shape[0], columns)
    stored = blank_stored(x, parts)
    if function.is_exact:
        PACK_DERIVATIVE(x, views(stored, parts)[0], function, bits, None, index)
        return stored
    place, codes, *scales = views(stored, parts)
    seeds = fresh_seed(place, seed)
    if not function.is_bounded:
        rows = torch.relu(x if index is None else x.index_select(0, index))
        PACK(rows, bits, seeds, out=(codes, *scales))
    else:
        # Written before: a kernel may write a mark there in its place.
        PACK_DERIVATIVE(x, codes, function, bits, written(seeds), index)
    return stored


@pack_derivative.register_fake
def _(x, index, seed, name, parameters, bits):
    parts = stored_parts(Pointwise(name), bits, x.shape[0] if index is None else index.shape[0], x.shape[1])
    return x.new_empty(stored_bytes(parts), dtype=torch.uint8)


@operator(
    "apply_derivative",
    "(Tensor y, Tensor stored, Tensor? index, str name, float[] parameters, int bits) -> Tensor",
    samples=_backward_samples,
    flops=lambda y, *_: math.prod(y),
    native=native.apply_stored,
    is_repeated=True,
)
def apply_derivative(
    y: Tensor, stored: Tensor, index: Tensor | None, name: str, parameters: Sequence[float], bits: int
) -> Tensor:
    """Multiply dY, shape (N, C), by the stored derivative; rows that are not stored get zeros."""
    rows, columns = y.shape
    function, parts = stored_layout(name, tuple(parameters), bits, rows if index is None else index.shape[0], columns)
    if function.is_exact:
        return APPLY_DERIVATIVE(y, views(stored, parts)[0], function, bits, None, index)
    seeds, codes, *scales = views(stored, parts)
    if function.is_bounded:
        return APPLY_DERIVATIVE(y, codes, function, bits, seeds, index)
    wide = torch.promote_types(y.dtype, torch.float32)
    relu = UNPACK(codes, *scales, seeds, bits, y.shape[1], wide)
    if index is None:
        return relu.mul_(2).mul_(y).to(y.dtype)
    return y.new_zeros(y.shape).index_copy_(0, index, relu.mul_(2).mul_(y.index_select(0, index)).to(y.dtype))


@apply_derivative.register_fake
def _(y, stored, index, name, parameters, bits):
    return y.new_empty(y.shape)


@operator(
    "activate_and_pack",
    "(Tensor x, Tensor? index, SymInt? seed, str name, float[] parameters, int bits) -> (Tensor, Tensor)",
    samples=_operator_samples,
    flops=lambda x, *_: 2 * math.prod(x),  # the function and its derivative
    native=native.activated,
    is_repeated=True,
)
def activate_and_pack(
    x: Tensor, index: Tensor | None, seed: int | None, name: str, parameters: Sequence[float], bits: int
) -> tuple[Tensor, Tensor]:
    """Apply a pointwise function and save its derivative, see :func:`rmm_linear.ops.dispatch.runs_fused`.

    Arguments as for :func:`pack_derivative`; the rows of ``index`` are distinct. Returns g(x) of all rows, shape (N,
    C), contiguous; and the bytes of ``pack_derivative``.
    """
    rows, columns = x.shape
    function, parts = stored_layout(name, tuple(parameters), bits, rows if index is None else index.shape[0], columns)
    stored = blank_stored(x, parts)
    if function.is_exact:
        return ACTIVATE(x, views(stored, parts)[0], function, bits, None, index).contiguous(), stored
    place, *tensors = views(stored, parts)
    seeds = fresh_seed(place, seed)
    if function.is_bounded:
        return ACTIVATE(x, tensors[0], function, bits, written(seeds), index).contiguous(), stored
    return SQUARE(x, bits, seeds, index, out=tuple(tensors))[0].contiguous(), stored


@activate_and_pack.register_fake
def _(x, index, seed, name, parameters, bits):
    rows = x.shape[0] if index is None else index.shape[0]
    parts = stored_parts(Pointwise(name), bits, rows, x.shape[1])
    return x.new_empty(x.shape), x.new_empty(stored_bytes(parts), dtype=torch.uint8)
