"""Sketches, sampled rows and packing: their rows of the table, and the weight gradient from what was saved of an input.

Operators do not call each other: inside an operator, the functions run instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rmm_linear import packing, sketches
from rmm_linear.ops import plain, triton
from rmm_linear.ops.dispatch import FLOATS, Call, Case, call, into, operation, operator
from rmm_linear.ops.native import sketches as native
from rmm_linear.ops.plain import fp16_scale
from rmm_linear.packing import CODES, GROUP, WIDTHS
from rmm_linear.sketches import FAMILIES, SAMPLERS, UNIFORM_MIX, RowSample, TokenMask, has_blocks, kept_rows
from rmm_linear.sketches.blocks import block_rows
from rmm_linear.spec import SaveSpec

_TRANSFORMS = "hadamard", "dct", "dft"
_DIRECTED = 6  # tensors that are saved with fixed directions
_KINDS = [*((kind, None) for kind in FAMILIES), *((kind, 4) for kind in FAMILIES if has_blocks(kind))]

# The arguments that a spec and a token mask are in an operator. SymInt: an int would fix the number of tokens that rows
# follow from in compiled code.
SCHEMA = (
    "str kind, SymInt rows, SymInt? block=None, float? bits=None, float uniform_mix=0.0, "
    "Tensor? order=None, Tensor? count=None"
)


def to_arguments(spec: SaveSpec, mask: TokenMask | None) -> tuple[Any, ...]:
    """Convert a spec and a mask to the arguments of :data:`SCHEMA`, in its order."""
    ranks = (None, None) if mask is None else (mask.order, mask.count)
    return spec.kind, spec.rows, spec.block, spec.bits, spec.uniform_mix, *ranks


def from_arguments(
    kind: str,
    rows: int,
    block: int | None = None,
    bits: float | None = None,
    uniform_mix: float = 0.0,
    order: Tensor | None = None,
    count: Tensor | None = None,
) -> tuple[SaveSpec, TokenMask | None]:
    """Convert the arguments of :func:`to_arguments` back."""
    mask = None if order is None or count is None else TokenMask(order, count)
    return SaveSpec(kind, rows, block, whole(bits), uniform_mix), mask


def whole(bits: float | None) -> float | None:
    """Return a width as an integer if it is one, as operators get it as a float."""
    return bits if bits is None or bits != int(bits) else int(bits)


def specs(case: Case, *widths: float | None) -> Iterator[SaveSpec]:
    """Every kind that follows from a seed, with fewer rows than tokens where there are some, and every row once."""
    kinds = [(kind, block) for kind, block in _KINDS if case.columns or kind not in _TRANSFORMS]  # FFTs need a column
    for place, (kind, block) in enumerate(kinds):
        yield SaveSpec(kind, max(1, case.rows // 3), block, widths[place % len(widths)])
    yield SaveSpec("countsketch", case.rows + 3, None, widths[0])


def _sketch_samples(case: Case) -> Iterator[Call]:
    for spec in specs(case, None):
        shape = {"kind": spec.kind, "seed": case.seeds, "rows": spec.rows, "block": spec.block}
        yield call(case.matrix(), **shape, mask=case.mask)
        if case.dtype == torch.float16:
            yield call(case.matrix(), **shape, mask=case.mask, dtype=torch.float32)


def _packed_sketch_samples(case: Case) -> Iterator[Call]:
    for spec in specs(case, *CODES):
        yield call(case.matrix(), case.seeds, spec, case.mask)


def _product_samples(case: Case) -> Iterator[Call]:
    for spec in specs(case, *CODES):
        codes, scales = plain.packed_sketch(case.matrix(), case.seeds, spec, case.mask)
        yield call(case.matrix(1, 9), codes, scales, case.seeds, spec, case.columns, case.mask)


def _pack_samples(case: Case) -> Iterator[Call]:
    for bits in WIDTHS:
        yield call(case.matrix(), bits, case.seeds)


def _unpack_samples(case: Case) -> Iterator[Call]:
    for bits in WIDTHS:
        codes, scales = packing.pack(case.matrix(), bits, case.seeds)
        for rotated in (False, True):
            yield call(codes, scales, case.seeds, bits, case.columns, case.dtype, rotated=rotated)


def _encode_samples(case: Case) -> Iterator[Call]:
    for bits in CODES:
        yield call(case.matrix(), bits, case.seeds)


def _decode_samples(case: Case) -> Iterator[Call]:
    for bits in CODES:
        codes, scales = packing.encode(case.matrix(), bits, case.seeds)
        for rotated in (False, True):
            yield call(codes, scales, case.seeds, bits, case.columns, case.dtype, rotated=rotated)


def _basis(case: Case) -> Tensor:
    return torch.linalg.qr(torch.randn(max(case.columns, 1), 2, generator=torch.Generator().manual_seed(0)))[0]


def _directed_samples(case: Case) -> Iterator[Call]:
    for bits in (4, 1.6) if case.columns > 1 else ():
        yield call(case.matrix(), bits, case.seeds, _basis(case), case.index)


def _directed_product_samples(case: Case) -> Iterator[Call]:
    for (x, bits, seeds, basis, index), _named in _directed_samples(case):
        codes, scales, *coordinates = plain.directed(x, bits, seeds, basis, index)
        saved = codes, scales, seeds, *coordinates, basis
        yield call(case.matrix(1, 9), saved, bits, case.columns, index)


def _sampling_samples(case: Case) -> Iterator[Call]:
    x = case.matrix() * torch.arange(1, case.rows + 1).to(case.dtype).unsqueeze(1)
    for kind in SAMPLERS if case.rows > 1 else ():
        for expected in (None, torch.linspace(1, 3, case.rows)):
            yield call(x, case.seeds, SaveSpec(kind, case.rows // 2, None, None, UNIFORM_MIX), expected, case.mask)


def _sample(case: Case) -> RowSample:
    index = torch.arange(case.rows) if case.index is None else case.index
    return RowSample(index.int(), torch.linspace(-2, 3, len(index)))


def _gather_samples(case: Case) -> Iterator[Call]:
    yield call(case.matrix(), _sample(case))


def _packed_rows_samples(case: Case) -> Iterator[Call]:
    for bits in CODES:
        yield call(case.matrix(), case.seeds, _sample(case), bits)


# In C, float64 has the random numbers of the library, and is packed in float32.
SKETCH = operation(
    "SKETCH",
    plain.sketch, native.sketch, triton.sketch, _sketch_samples, native_dtypes=FLOATS, by_row=False,
)  # fmt: skip
PACKED_SKETCH = operation(
    "PACKED_SKETCH", plain.packed_sketch, native.packed_sketch, triton.packed_sketch, _packed_sketch_samples,
    native_dtypes=FLOATS, moved=0.002, rounds_sums=False, by_row=False,
)  # fmt: skip
UNPACKED_PRODUCT = operation(
    "UNPACKED_PRODUCT", plain.unpacked_product, native.unpacked_product, triton.unpacked_product, _product_samples,
    native_dtypes=FLOATS, by_row=False,
)  # fmt: skip
PACK = operation(
    "PACK", into(packing.pack), native.pack, triton.pack, _pack_samples, native_dtypes=FLOATS, moved=0.002
)  # fmt: skip
UNPACK = operation(
    "UNPACK", packing.unpack, native.unpack, triton.unpack, _unpack_samples, native_dtypes=FLOATS
)  # fmt: skip
ENCODE = operation(
    "ENCODE", packing.encode, native.encode, triton.encode, _encode_samples, native_dtypes=FLOATS, moved=0.002
)  # fmt: skip
DECODE = operation(
    "DECODE", packing.decode, native.decode, triton.decode, _decode_samples, native_dtypes=FLOATS
)  # fmt: skip
DIRECTED = operation(
    "DIRECTED", plain.directed, native.directed, triton.directed, _directed_samples, native_dtypes=FLOATS, moved=0.002
)  # fmt: skip
DIRECTED_PRODUCT = operation(
    "DIRECTED_PRODUCT", plain.directed_product, native.directed_product, triton.directed_product,
    _directed_product_samples, native_dtypes=FLOATS, by_row=False,
)  # fmt: skip
SAMPLE_ROWS = operation(
    "SAMPLE_ROWS", plain.sample_rows, native.sample_rows, triton.sample_rows, _sampling_samples,
    native_dtypes=FLOATS, by_row=False,
)  # fmt: skip
GATHER_ROWS = operation(
    "GATHER_ROWS", sketches.gather, native.gather_rows, triton.gather_rows, _gather_samples
)  # fmt: skip
PACKED_ROWS = operation(
    "PACKED_ROWS", plain.packed_rows, native.packed_rows, triton.packed_rows, _packed_rows_samples,
    native_dtypes=FLOATS, moved=0.002, rounds_sums=False,
)  # fmt: skip


def sketch_flops(shape: Sequence[int], kind: str, rows: int, block: int | None = None, *_: object) -> int:
    """Count the multiplications and additions of a sketch of a matrix (N, D), as PyTorch counts those of a product."""
    tokens, columns = shape
    if kept_rows(tokens, rows, block) >= tokens:
        return 0
    if kind in ("gaussian", "rademacher"):
        return 2 * tokens * columns * block_rows(tokens, rows, block)[2]
    if kind in _TRANSFORMS:
        return round(tokens * columns * math.log2(max(block_rows(tokens, rows, block)[0], 2)))
    return tokens * columns if kind == "countsketch" else rows * columns


def _product_flops(y: Sequence[int], codes: Sequence[int], scales, seed, columns: int, *how: Any) -> int:
    stored_rows, outputs = codes[0], y[1]
    unpacking = 2 * stored_rows * columns + 2 * GROUP * outputs * columns
    return sketch_flops(y, *how) + 2 * stored_rows * outputs * columns + unpacking


@operator(
    "sketch",
    f"(Tensor matrix, Tensor seed, {SCHEMA}, float scale=1.0) -> Tensor",
    samples=lambda case: (call(case.matrix(), case.seeds, spec, case.mask, 0.5) for spec in specs(case, None)),
    flops=lambda matrix, seed, *how, **named: sketch_flops(matrix, *how, **named),
    native=native.scaled_sketch,
    flatten=lambda matrix, seed, spec, mask, scale: (matrix, seed, *to_arguments(spec, mask), scale),
    registered=lambda function, matrix, seed, *how, scale=1.0, **named: function(
        matrix, seed, *from_arguments(*how[:7], **named), *(how[7:] or (scale,))
    ),
)
def scaled_sketch(
    matrix: Tensor, seed: Tensor, spec: SaveSpec, mask: TokenMask | None = None, scale: float = 1.0
) -> Tensor:
    """Return SᵀM times a number, in new memory, contiguous, shape (kept_rows, D) and dtype of M.

    scale: See :func:`rmm_linear.ops.plain.fp16_scale`. If it is not 1, the sketch is made in float32.
    """
    dtype = None if scale == 1 else torch.float32
    result = SKETCH(matrix, kind=spec.kind, seed=seed, rows=spec.rows, block=spec.block, mask=mask, dtype=dtype)
    if scale != 1:
        return (result * scale).to(matrix.dtype, memory_format=torch.contiguous_format)
    if result is matrix:
        return result.clone(memory_format=torch.contiguous_format)
    return result.contiguous()  # the transforms return other strides


@scaled_sketch.register_fake
def _(matrix, seed, kind, rows, block=None, *arguments, **named):
    return matrix.new_empty(kept_rows(matrix.shape[0], rows, block), matrix.shape[1])


def _flat_product(function, y, codes, scales, seed, columns, *how, **named):
    spec, mask = from_arguments(*how, **named)
    return function(y, codes, scales, seed, spec, columns, mask)


@operator(
    "unpacked_product",
    f"(Tensor y, Tensor codes, Tensor scales, Tensor seed, SymInt columns, {SCHEMA}) -> Tensor",
    samples=_product_samples,
    flops=_product_flops,
    native=native.unpacked_product,
    flatten=lambda y, codes, scales, seed, spec, columns, mask: (
        y, codes, scales, seed, columns, *to_arguments(spec, mask)
    ),
    registered=_flat_product,
)  # fmt: skip
def unpacked_product(
    y: Tensor, codes: Tensor, scales: Tensor, seed: Tensor, spec: SaveSpec, columns: int, mask: TokenMask | None
) -> Tensor:
    """Return (SᵀY)ᵀ decode(Z), see :func:`rmm_linear.ops.plain.unpacked_product`."""
    return UNPACKED_PRODUCT(y, codes, scales, seed, spec, columns, mask)


@unpacked_product.register_fake
def _(y, codes, scales, seed, columns, *arguments, **named):
    return y.new_empty(y.shape[1], columns)


@operator(
    "gather_rows",
    "(Tensor matrix, Tensor index, Tensor scale) -> Tensor",
    samples=_gather_samples,
    flops=lambda matrix, index, scale: index[0] * matrix[1],
    flatten=lambda matrix, sample: (matrix, *sample),
    registered=lambda function, matrix, index, scale: function(matrix, RowSample(index, scale)),
)
def gather_rows(matrix: Tensor, sample: RowSample) -> Tensor:
    """Return SᵀM for sampled rows, see :func:`rmm_linear.sketches.gather`."""
    return GATHER_ROWS(matrix, sample)


@gather_rows.register_fake
def _(matrix, index, scale):
    return matrix.new_empty(index.shape[0], matrix.shape[1])


def weight_gradient(
    y: Tensor,
    saved: Sequence[Tensor],
    spec: SaveSpec,
    features: int,
    mask: TokenMask | None,
    *,
    in_operator: bool = False,
) -> Tensor:
    """Return the estimate of dW = YᵀX from :func:`rmm_linear.ops.save.save`'s result: (SᵀY)ᵀ Z, shape (O, I).

    Behind the result is the basis of fixed directions, if there is one. ``in_operator`` says that the caller is an
    operator, which may call no other one.
    """
    sketch, gather, product = (
        one.function if in_operator else one for one in (scaled_sketch, gather_rows, unpacked_product)
    )
    if spec.samples_rows(y.shape[0]):
        index, scale = saved[-3:-1] if spec.bits else saved[-2:]
        y = gather(y, RowSample(index, scale * fp16_scale(y.dtype, y.shape[0], spec.rows)))
        if spec.bits is None:
            return y.T @ saved[0]
        # SᵀY has K rows already, and K rows are not sketched again.
        return product(y, saved[0], saved[1], saved[-1], spec, features, None)
    if len(saved) == _DIRECTED:
        return DIRECTED_PRODUCT(y, saved, spec.bits, features, None if mask is None else mask.index)
    if spec.bits is not None:
        return product(y, *saved, spec, features, mask)
    rows = spec.kept_rows(y.shape[0])
    if mask is not None or rows < y.shape[0]:
        y = sketch(y, saved[1], spec, mask, fp16_scale(y.dtype, y.shape[0], rows))
    return y.T @ saved[0]
