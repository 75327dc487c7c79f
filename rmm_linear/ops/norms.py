"""LayerNorm and RMSNorm from one packed copy of the normalized rows: the operators that make it and read it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rmm_linear.ops import triton
from rmm_linear.ops.dispatch import Call, Case, call, into, operation, operator
from rmm_linear.ops.native import norms as native
from rmm_linear.packing import GROUP, WIDTHS, check_bits
from rmm_linear.packing import norms as plain
from rmm_linear.packing.norms import NormCopy, norm_parts
from rmm_linear.packing.stored import blank_stored, stored_bytes, views
from rmm_linear.sketches.seeds import fresh_seed

_EPS = 1e-5  # of samples


def _normalize_plainly(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    bits: int,
    seed: Tensor,
    eps: float,
    centered: bool = True,
    index: Tensor | None = None,
    *,
    out: NormCopy | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    output = plain.normalize(x, gamma, beta, dtypes, eps, centered)
    return output, *PACK_NORM(x, bits, seed, eps, centered, index, out=out)


def _pack_samples(case: Case) -> Iterator[Call]:
    for bits in WIDTHS if case.columns else ():
        centered = bits != 4 and case.columns > 1
        yield call(case.matrix() + 1, bits, case.seeds, _EPS if case.columns > 1 else 1.0, centered, case.index)


def _gradients_samples(case: Case) -> Iterator[Call]:
    for (x, bits, seeds, eps, centered, index), _ in _pack_samples(case):
        saved = plain.pack_norm(x, bits, seeds, eps, centered, index)
        for dtype, sums, of_sums in ((None, True, None), (torch.float32, False, None), (None, True, case.dtype)):
            how = {"centered": centered, "index": index, "dtype": dtype, "sums": sums, "sum_dtype": of_sums}
            yield call(case.matrix(1), saved, bits, seeds, case.vector() if sums else None, **how)


def _normalize_samples(case: Case) -> Iterator[Call]:
    for (x, *how), _ in _pack_samples(case):
        yield call(x, case.vector(), case.vector(1), (torch.float32, case.dtype), *how)
        yield call(x, case.vector(), None, (case.dtype, case.dtype), *how)


PACK_NORM = operation(
    "PACK_NORM", into(plain.pack_norm), native.pack_norm, triton.pack_norm, _pack_samples, moved=0.002
)
NORM_GRADIENTS = operation(
    "NORM_GRADIENTS", plain.norm_gradients, native.norm_gradients, triton.norm_gradients, _gradients_samples
)
NORMALIZE = operation("NORMALIZE", _normalize_plainly, None, triton.normalize, _normalize_samples, moved=0.002)


def norm_bytes(rows: int, columns: int, bits: int) -> int:
    """Return the bytes saved of a norm's input: seed, rstd and packed copy, each rounded up to a multiple of 16.

    Example:
        >>> norm_bytes(1024, 768, 2), 1024 * 768 * 4
        (213008, 3145728)
    """
    return stored_bytes(norm_parts(rows, columns, bits))


def _operator_samples(case: Case) -> Iterator[Call]:
    for (x, bits, _, eps, centered, index), _ in _pack_samples(case):
        yield call(x, index, case.seed, bits, eps, centered)
    if case.columns % 2 == 0:
        yield call(case.matrix().unflatten(1, (2, -1)), case.index, case.seed, 4, _EPS, True, 2)


def _backward_samples(case: Case) -> Iterator[Call]:
    for (x, index, seed, bits, eps, centered, *_), _ in _operator_samples(case):
        stored = pack_norm.function(x.flatten(1), index, seed, bits, eps, centered)
        sums = bits != 8
        how = index, bits, centered, case.dtype, sums, case.dtype if bits == 4 else None
        yield call(case.matrix(1), stored, case.vector() if sums else None, *how)


def _fused_samples(case: Case) -> Iterator[Call]:
    for (x, *how, centered), _ in (one for one in _operator_samples(case) if len(one.arguments) == 6):
        yield call(x, case.vector(), case.vector(1) if centered else None, *how, centered, torch.float32, case.dtype)


@operator(
    "pack_norm",
    "(Tensor x, Tensor? index, SymInt? seed, int bits, float eps, bool centered, int dims=1) -> Tensor",
    samples=_operator_samples,
    flops=lambda x, *_, **named: (2 * GROUP + 8) * math.prod(x),  # the rotation, the statistics and the rounding
    native=native.stored_norm,
    is_repeated=True,
)
def pack_norm(x, index, seed, bits, eps, centered, dims=1):
    """Normalize rows, and store them in few bits: :func:`norm_bytes` bytes, of seed, rstd, codes and scales.

    x: Floating point; its last ``dims`` dimensions have H elements together, and make a row of the others' N. index:
    Rows to store, int64, shape (n,); None for all.
    """
    matrix = _matrix(x, dims)
    parts = norm_parts(matrix.shape[0] if index is None else index.shape[0], matrix.shape[1], bits)
    stored = blank_stored(x, parts)
    place, rstd, codes, scales = views(stored, parts)
    PACK_NORM(matrix, bits, fresh_seed(place, seed), eps, centered, index, out=NormCopy(codes, scales, rstd))
    return stored


@pack_norm.register_fake
def _(x, index, seed, bits, eps, centered, dims=1):
    rows, columns = _shape(x.shape, dims)
    return x.new_empty(norm_bytes(rows if index is None else index.shape[0], columns, bits), dtype=torch.uint8)


@operator(
    "normalize_and_pack",
    "(Tensor x, Tensor? gamma, Tensor? beta, Tensor? index, SymInt? seed, int bits, float eps, bool centered, "
    "ScalarType before, ScalarType dtype, int dims=1) -> (Tensor, Tensor)",
    samples=_fused_samples,
    flops=lambda x, *_, **named: (2 * GROUP + 10) * math.prod(x),  # and γ and β
    is_repeated=True,
)
def normalize_and_pack(x, gamma, beta, index, seed, bits, eps, centered, before, dtype, dims=1):
    """Compute γ ∘ h + β of all rows, contiguous, and the bytes of :func:`pack_norm`.

    gamma, beta: Shape (H,); None is 1 and 0. before: The dtype that the normalized rows h are rounded to before they
    are multiplied by γ; float32 for none. dtype: Of the output. The rows of ``index`` are distinct.
    """
    matrix = _matrix(x, dims)
    parts = norm_parts(matrix.shape[0] if index is None else index.shape[0], matrix.shape[1], bits)
    stored = blank_stored(x, parts)
    place, rstd, codes, scales = views(stored, parts)
    out = NormCopy(codes, scales, rstd)
    how = matrix, gamma, beta, (before, dtype), check_bits(bits), fresh_seed(place, seed), eps, centered, index
    return NORMALIZE(*how, out=out)[0].contiguous().view(x.shape), stored


@normalize_and_pack.register_fake
def _(x, gamma, beta, index, seed, bits, eps, centered, before, dtype, dims=1):
    rows, columns = _shape(x.shape, dims)
    stored = x.new_empty(norm_bytes(rows if index is None else index.shape[0], columns, bits), dtype=torch.uint8)
    return x.new_empty(x.shape, dtype=dtype), stored


@operator(
    "norm_backward",
    samples=_backward_samples,
    flops=lambda y, *_: (2 * GROUP + 16) * math.prod(y),
    native=native.stored_norm_backward,
    is_repeated=True,
)
def norm_backward(
    y: Tensor,
    stored: Tensor,
    gamma: Tensor | None,
    index: Tensor | None,
    bits: int,
    centered: bool,
    dtype: torch.dtype,
    sums: bool,
    sum_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dX, and dγ and dβ if ``sums``, from the bytes of :func:`pack_norm`.

    y: Gradient with respect to the output, floating point, shape (N, H). gamma: γ, shape (H,); None is 1. Returns dX,
    shape (N, H), contiguous; dγ and dβ, of ``sum_dtype``, float32 (float64 if ``y`` is) for None, shape (H,), or (0,).
    """
    seeds, rstd, codes, scales = views(
        stored, norm_parts(y.shape[0] if index is None else index.shape[0], y.shape[1], bits)
    )
    saved = NormCopy(codes, scales, rstd)
    how = {"centered": centered, "index": index, "dtype": dtype, "sums": sums, "sum_dtype": sum_dtype}
    found = NORM_GRADIENTS(y, saved, bits, seeds, gamma, **how)
    return found.x.contiguous(), found.weight, found.bias


@norm_backward.register_fake
def _(y, stored, gamma, index, bits, centered, dtype, sums, sum_dtype=None):
    sum_dtype = sum_dtype or torch.promote_types(y.dtype, torch.float32)
    one, other = (y.new_empty(y.shape[1] if sums else 0, dtype=sum_dtype) for _ in range(2))
    return y.new_empty(y.shape, dtype=dtype), one, other


def _shape(shape: Sequence[int], dims: int) -> tuple[int, int]:
    """N and H; not by Size.numel, which would fix the lengths in compiled code."""
    return math.prod(shape[: len(shape) - dims]), math.prod(shape[len(shape) - dims :])


def _matrix(x: Tensor, dims: int) -> Tensor:
    """Return the rows of an input, shape (N, H)."""
    return x.reshape(-1, math.prod(x.shape[-dims:])) if x.numel() else x.new_empty(_shape(x.shape, dims))
