"""Sketches, sampled rows and packing with the C library: its random numbers always, its loops but for float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rmm_linear import packing, sketches
from rmm_linear._support.autocast import without_autocast
from rmm_linear.backends import native
from rmm_linear.backends.native import transforms
from rmm_linear.backends.native.library import TYPES
from rmm_linear.ops import plain
from rmm_linear.packing import GROUP
from rmm_linear.sketches import SAMPLERS, RowSample, TokenMask, countsketch
from rmm_linear.sketches.family import accumulator_dtype
from rmm_linear.sketches.philox import signs as random_signs
from rmm_linear.sketches.rows import sample
from rmm_linear.sketches.transforms import next_power_of_two
from rmm_linear.spec import SaveSpec

_CHUNK = 1 << 20  # elements that are packed or unpacked at a time


def sketch(
    matrix: Tensor,
    *,
    kind: str,
    seed: Tensor,
    rows: int,
    block: int | None = None,
    mask: TokenMask | None = None,
    p: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return SᵀM as :func:`rmm_linear.ops.plain.sketch` does."""
    tokens = matrix.shape[0]
    if dtype not in TYPES or matrix.dtype not in TYPES or not _is_hashed(matrix, kind, rows, mask):
        matrix, dtype = matrix if dtype is None else matrix.to(dtype), None
    sketch_rows = sketches.kept_rows(tokens, rows, block)
    if mask is None and sketch_rows >= tokens:
        return matrix
    shape = {"kind": kind, "seed": seed, "rows": rows, "block": block, "mask": mask}
    if kind in SAMPLERS and sketch_rows < tokens:
        return sketches.sketch(matrix, **shape, p=p, generator=native.philox)
    return _sketch_parts(matrix, **shape, dtype=dtype)(0, sketch_rows)


def _sketch_parts(
    matrix: Tensor,
    *,
    kind: str,
    seed: Tensor,
    rows: int,
    block: int | None,
    mask: TokenMask | None,
    dtype: torch.dtype | None = None,
) -> Callable[[int, int], Tensor]:
    """As :func:`rmm_linear.sketches.sketch_parts`; a CountSketch may have another dtype than the matrix."""
    if kind == "rows" and mask is None and rows < matrix.shape[0]:
        index = sample(seed, matrix.shape[0], rows, generator=native.philox)
        scale = matrix.new_full((rows,), (matrix.shape[0] / rows) ** 0.5, dtype=accumulator_dtype(matrix.dtype))
        return _row_parts(matrix, RowSample(index, scale))
    if kind in transforms.KINDS and (block is None or block >= matrix.shape[0]) and matrix.dtype in TYPES:
        whole = _transformed(matrix, seed, kind, rows, mask)
        if whole is not None:
            return lambda begin, end: whole[begin:end]
    if not _is_hashed(matrix, kind, rows, mask):
        shape = {"kind": kind, "seed": seed, "rows": rows, "block": block, "mask": mask}
        return sketches.sketch_parts(matrix, **shape, generator=native.philox)
    index = _valid_rows(mask)
    if matrix.dtype not in TYPES:
        source = matrix if index is None else matrix[index]
        return countsketch.hashed_part(source, *native.signs_and_shifts(seed, len(source), rows), rows)
    source = _contiguous_rows(matrix)
    return lambda begin, end: native.countsketch(source, int(seed), rows, begin, end, index, dtype)


def _transformed(matrix: Tensor, seed: Tensor, kind: str, rows: int, mask: TokenMask | None) -> Tensor | None:
    """The sketch by a transform; None if no row is left out, or for a length that the library does not transform."""
    tokens = matrix.shape[0]
    count, size = tokens if mask is None else mask.valid_count, next_power_of_two(max(tokens, 1))
    if count <= rows or (kind != "hadamard" and size != tokens):
        return None
    places = seed.new_full((size,), -1)
    places[:count] = torch.arange(count, device=seed.device) if mask is None else mask.order[:count]
    signs = seed.new_zeros(size, dtype=torch.float32)
    signs[:tokens] = random_signs(seed, tokens, generator=native.philox)
    index = sample(seed, size, rows, generator=native.philox)
    return transforms.sampled_transform(_contiguous_rows(matrix), kind, index, places, signs)


def _is_hashed(matrix: Tensor, kind: str, rows: int, mask: TokenMask | None) -> bool:
    return kind == "countsketch" and rows < (matrix.shape[0] if mask is None else mask.valid_count)


def _is_whole(matrix: Tensor, spec: SaveSpec, mask: TokenMask | None) -> bool:
    """Say whether a sketch is the matrix itself."""
    return spec.kind == "countsketch" and mask is None and 0 < matrix.shape[0] <= spec.rows


def _valid_rows(mask: TokenMask | None) -> Tensor | None:
    return None if mask is None else mask.index


def _contiguous_rows(matrix: Tensor) -> Tensor:
    """Return the matrix with the elements of every row side by side, as the C library needs them."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def packed_sketch(matrix: Tensor, seed: Tensor, spec: SaveSpec, mask: TokenMask | None) -> tuple[Tensor, Tensor]:
    """Return pack(SᵀM) as :func:`rmm_linear.ops.plain.packed_sketch` does: a CountSketch is packed row by row."""
    bits = spec.bits or 0
    if matrix.dtype not in TYPES or not _is_hashed(matrix, spec.kind, spec.rows, mask):
        if matrix.dtype == torch.float16 and spec.kind != "countsketch":  # whose rows are those of the matrix then
            matrix = matrix.float()
        parts = _sketch_parts(matrix, kind=spec.kind, seed=seed, rows=spec.rows, block=spec.block, mask=mask)
        return _pack_parts(parts, (spec.kept_rows(matrix.shape[0]), matrix.shape[1]), bits, seed)
    codes, qparams = packing.empty_packed(spec.rows, matrix.shape[1], packing.check_bits(bits), seed)
    _pack(_contiguous_rows(matrix), bits, int(seed), codes, qparams, 0, _valid_rows(mask))
    return codes, qparams


def _pack(
    matrix: Tensor, bits: int, seed: int, codes: Tensor, qparams: Tensor, first: int = 0, index: Tensor | None = None
) -> None:
    """Write the codes and qparams of rows, or of fewer rows those of a CountSketch of them."""
    rows = codes.shape[0]
    if not native.pack(matrix, bits, seed, codes.data_ptr(), qparams.data_ptr(), rows, first, index):
        packing.mark_infinite(qparams)


def save(x: Tensor, spec: SaveSpec, mask: TokenMask | None, seed: int, expected: Tensor | None = None) -> Any:
    """Return what :func:`rmm_linear.ops.save.save` does, of a CountSketch or of all rows, packed."""
    is_hashed = _is_hashed(x, spec.kind, spec.rows, mask)
    if not is_hashed and not _is_whole(x, spec, mask):
        return NotImplemented
    if spec.bits is None and (x.dtype == torch.float16 or not is_hashed):
        return NotImplemented
    x, seeds = _contiguous_rows(x), torch.full((1,), seed, dtype=torch.int64, device=x.device)
    if spec.bits is None:
        return native.countsketch(x, seed, spec.rows, 0, spec.rows, _valid_rows(mask)), seeds
    rows, columns = min(spec.rows, x.shape[0]), x.shape[1]
    codes = x.new_empty(rows, (columns * spec.bits + 7) // 8, dtype=torch.uint8)
    qparams = x.new_empty(rows, (columns + GROUP - 1) // GROUP, 2, dtype=torch.bfloat16)
    _pack(x, spec.bits, seed, codes, qparams, 0, _valid_rows(mask))
    return codes, qparams, seeds


def scaled_sketch(
    matrix: Tensor, seed: Tensor, spec: SaveSpec, mask: TokenMask | None = None, scale: float = 1.0
) -> Any:
    """Return what :func:`rmm_linear.ops.sketches.scaled_sketch` does, of a CountSketch."""
    if scale != 1 or not _is_hashed(matrix, spec.kind, spec.rows, mask):
        return NotImplemented
    return native.countsketch(_contiguous_rows(matrix), int(seed), spec.rows, 0, spec.rows, _valid_rows(mask))


def unpacked_product(
    y: Tensor, codes: Tensor, qparams: Tensor, seed: Tensor, spec: SaveSpec, columns: int, mask: TokenMask | None
) -> Tensor:
    """Return (SᵀY)ᵀ unpack(Z) as :func:`rmm_linear.ops.plain.unpacked_product` does."""
    dtype, wide = y.dtype, torch.float32 if y.dtype == torch.float16 else y.dtype
    is_hashed = _is_hashed(y, spec.kind, spec.rows, mask)
    is_small = dtype in TYPES and codes.shape[0] * max(columns, y.shape[1]) <= _CHUNK
    if is_small and (is_hashed or _is_whole(y, spec, mask)):  # at once
        value, sketched = int(seed), y.to(wide)
        if is_hashed:
            sketched = native.countsketch(_contiguous_rows(y), value, spec.rows, 0, spec.rows, _valid_rows(mask), wide)
        is_last = codes.shape[0] > y.shape[1]  # rotates the smaller one of Z and the product back
        values = codes.new_empty(codes.shape[0], columns, dtype=wide if is_last else torch.float32)
        native.unpack(codes.data_ptr(), qparams.data_ptr(), spec.bits or 0, value, values, rotated=is_last)
        product = torch.mm(sketched.T, values.to(wide))
        return (_unrotate(product, seed) if is_last else product).to(dtype)
    if dtype != wide and not is_hashed:
        y = y.to(wide)
    sketched = _sketch_parts(
        y,
        kind=spec.kind,
        seed=seed,
        rows=spec.rows,
        block=spec.block,
        mask=mask,
        dtype=None if y.dtype == wide else wide,
    )
    unpacked = unpacked_rows(codes, qparams, seed, spec.bits or 0, columns, wide, rotated=True)
    like = y if y.dtype == wide else y.new_empty(0, y.shape[1], dtype=wide)
    return _unrotate(plain.product_of_parts(like, codes.shape[0], columns, sketched, unpacked), seed).to(dtype)


def pack(matrix: Tensor, bits: int, seed: Tensor, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Pack as :func:`rmm_linear.packing.pack` does."""
    rows, columns = matrix.shape
    if matrix.dtype not in TYPES or rows * columns > _CHUNK:
        return _pack_parts(lambda begin, end: matrix[begin:end], (rows, columns), bits, seed, out)
    codes, qparams = out or packing.empty_packed(rows, columns, packing.check_bits(bits), seed)
    _pack(_contiguous_rows(matrix), bits, int(seed), codes, qparams)
    return codes, qparams


def _pack_parts(
    part: Callable[[int, int], Tensor],
    shape: tuple[int, int],
    bits: int,
    seed: Tensor,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    codes, qparams = out or packing.empty_packed(*shape, packing.check_bits(bits), seed)
    for rows in packing.row_parts(*shape, seed.device, _CHUNK):
        values = part(rows.start, rows.stop)
        values = _contiguous_rows(values if values.dtype in TYPES else values.float())
        _pack(values, bits, int(seed), codes[rows], qparams[rows], rows.start)
    return codes, qparams


@without_autocast
def unpack(
    codes: Tensor,
    qparams: Tensor,
    seed: Tensor,
    bits: int,
    columns: int,
    dtype: torch.dtype,
    *,
    rotated: bool = False,
) -> Tensor:
    """Unpack as :func:`rmm_linear.packing.unpack` does."""
    unpacked = unpacked_rows(codes, qparams, seed, bits, columns, dtype, rotated=True)
    if dtype in TYPES:
        matrix = unpacked(0, len(codes))
    else:
        matrix = codes.new_empty(len(codes), columns, dtype=dtype)
        for rows in packing.row_parts(len(codes), columns, codes.device, _CHUNK):
            matrix[rows] = unpacked(rows.start, rows.stop)
    return matrix if rotated else _unrotate(matrix, seed)


def unpacked_rows(
    codes: Tensor,
    qparams: Tensor,
    seed: Tensor,
    bits: int,
    columns: int,
    dtype: torch.dtype,
    *,
    rotated: bool = False,
) -> Callable[[int, int], Tensor]:
    """Return a function of ``begin`` and ``end`` that unpacks rows as :func:`rmm_linear.packing.unpack` does."""
    codes, qparams, value = codes.contiguous(), qparams.contiguous(), int(seed)
    made = dtype if dtype in TYPES and rotated else torch.float32

    def part(begin: int, end: int) -> Tensor:
        values = codes.new_empty(end - begin, columns, dtype=made)
        native.unpack(codes.data_ptr(), qparams.data_ptr(), bits, value, values, begin, rotated=rotated)
        return values.to(dtype)

    return part


def _unrotate(matrix: Tensor, seed: Tensor) -> Tensor:
    """As :func:`rmm_linear.packing.unrotate`, in place where possible."""
    if matrix.dtype != torch.float32 or not matrix.is_contiguous():
        return packing.unrotate(matrix, seed)
    native.unrotate(matrix, int(seed))
    return matrix


def sample_rows(x: Tensor, seed: Tensor, spec: SaveSpec, expected: Tensor | None, mask: TokenMask | None) -> RowSample:
    """Sample rows as :func:`rmm_linear.ops.plain.sample_rows` does."""
    return plain.sample_rows(x, seed, spec, expected, mask, native.philox)


def packed_rows(matrix: Tensor, seed: Tensor, sample: RowSample, bits: int) -> tuple[Tensor, Tensor]:
    """Pack sampled rows as :func:`rmm_linear.ops.plain.packed_rows` does."""
    return _pack_parts(_row_parts(matrix, sample), (len(sample.index), matrix.shape[1]), bits, seed)


def gather_rows(matrix: Tensor, sample: RowSample) -> Tensor:
    """Return SᵀM for sampled rows as :func:`rmm_linear.sketches.gather` does."""
    index, scale = sample.index.long().contiguous(), sample.scale.float().contiguous()
    return native.gather_rows(_contiguous_rows(matrix), index, scale)


def _row_parts(matrix: Tensor, sample: RowSample) -> Callable[[int, int], Tensor]:
    """As :func:`rmm_linear.ops.plain.row_parts`."""
    if matrix.dtype not in TYPES:
        return plain.row_parts(matrix, sample)
    return lambda begin, end: gather_rows(matrix, RowSample(sample.index[begin:end], sample.scale[begin:end]))
