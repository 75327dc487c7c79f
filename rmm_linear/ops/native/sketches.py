"""Sketches, sampled rows and packing with the C library: its random numbers always, its loops but for float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rmm_linear import packing, sketches
from rmm_linear._support.autocast import without_autocast
from rmm_linear.backends import native
from rmm_linear.backends.native import transforms
from rmm_linear.backends.native.library import TYPES, read_seed, write_seed
from rmm_linear.ops import plain
from rmm_linear.packing import normal
from rmm_linear.packing.normal import GROUP as NORMAL_GROUP
from rmm_linear.packing.normal import LEVELS
from rmm_linear.packing.rounding import hadamard, rotate_groups
from rmm_linear.packing.stored import SEED, new_stored, offsets
from rmm_linear.sketches import SAMPLERS, RowSample, TokenMask, countsketch
from rmm_linear.sketches.family import accumulator_dtype
from rmm_linear.sketches.philox import signs as random_signs
from rmm_linear.sketches.philox import unpack_signs
from rmm_linear.sketches.rows import sample
from rmm_linear.sketches.transforms import next_power_of_two
from rmm_linear.spec import SaveSpec

_CHUNK = 1 << 20  # elements that are packed or unpacked at a time
_parts = functools.lru_cache(maxsize=4096)(packing.encoded_parts)


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
    """Say whether a sketch is the matrix itself, or all of its valid rows and no others."""
    if spec.kind != "countsketch" or not matrix.shape[0]:
        return False
    return matrix.shape[0] <= spec.rows if mask is None else mask.valid_count == spec.rows


def _valid_rows(mask: TokenMask | None) -> Tensor | None:
    return None if mask is None else mask.index


def _contiguous_rows(matrix: Tensor) -> Tensor:
    """Return the matrix with the elements of every row side by side, as the C library needs them."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def packed_sketch(matrix: Tensor, seed: Tensor, spec: SaveSpec, mask: TokenMask | None) -> tuple[Tensor, Tensor]:
    """Return pack(SᵀM) as :func:`rmm_linear.ops.plain.packed_sketch` does: a CountSketch is packed row by row."""
    bits = spec.bits or 0
    is_row_by_row = _is_hashed(matrix, spec.kind, spec.rows, mask) or (
        mask is not None and _is_whole(matrix, spec, mask)
    )
    if matrix.dtype not in TYPES or not is_row_by_row:
        if matrix.dtype == torch.float16 and spec.kind != "countsketch":  # whose rows are those of the matrix then
            matrix = matrix.float()
        parts = _sketch_parts(matrix, kind=spec.kind, seed=seed, rows=spec.rows, block=spec.block, mask=mask)
        return _encode_parts(parts, (spec.kept_rows(matrix.shape[0]), matrix.shape[1]), bits, seed)
    codes, scales = packing.empty_encoded(spec.rows, matrix.shape[1], packing.check_code(bits), seed)
    _encode(_contiguous_rows(matrix), bits, int(seed), codes, scales, 0, _valid_rows(mask))
    return codes, scales


def _encode(
    matrix: Tensor, bits: float, seed: int, codes: Tensor, scales: Tensor, first: int = 0, index: Tensor | None = None
) -> None:
    """Write the codes and scales of rows, or of fewer rows those of a CountSketch of them."""
    rows, levels = codes.shape[0], LEVELS.get(bits)
    native.pack(matrix, bits, seed, codes.data_ptr(), scales.data_ptr(), rows, first, index, levels)


def save(
    x: Tensor,
    spec: SaveSpec,
    mask: TokenMask | None,
    seed: int,
    expected: Tensor | None = None,
    basis: Tensor | None = None,
) -> Any:
    """Return what :func:`rmm_linear.ops.save.save` does, of a CountSketch or of all rows, packed."""
    is_hashed = _is_hashed(x, spec.kind, spec.rows, mask)
    if basis is not None or (not is_hashed and not _is_whole(x, spec, mask)):
        return NotImplemented
    if spec.bits is None and (x.dtype == torch.float16 or not is_hashed):
        return NotImplemented
    x, seeds = _contiguous_rows(x), torch.full((1,), seed, dtype=torch.int64, device=x.device)
    if spec.bits is None:
        return native.countsketch(x, seed, spec.rows, 0, spec.rows, _valid_rows(mask)), seeds
    rows, columns = min(spec.rows, x.shape[0]), x.shape[1]
    codes, scales = (x.new_empty(shape, dtype=dtype) for shape, dtype in _parts(rows, columns, spec.bits))
    _encode(x, spec.bits, seed, codes, scales, 0, _valid_rows(mask))
    return codes, scales, seeds


def scaled_sketch(
    matrix: Tensor, seed: Tensor, spec: SaveSpec, mask: TokenMask | None = None, scale: float = 1.0
) -> Any:
    """Return what :func:`rmm_linear.ops.sketches.scaled_sketch` does, of a CountSketch."""
    if scale != 1 or not _is_hashed(matrix, spec.kind, spec.rows, mask):
        return NotImplemented
    return native.countsketch(_contiguous_rows(matrix), int(seed), spec.rows, 0, spec.rows, _valid_rows(mask))


def unpacked_product(
    y: Tensor, codes: Tensor, scales: Tensor, seed: Tensor, spec: SaveSpec, columns: int, mask: TokenMask | None
) -> Tensor:
    """Return (SᵀY)ᵀ unpack(Z) as :func:`rmm_linear.ops.plain.unpacked_product` does."""
    dtype, wide = y.dtype, torch.float32 if y.dtype == torch.float16 else y.dtype
    bits = packing.check_code(spec.bits)
    is_hashed = _is_hashed(y, spec.kind, spec.rows, mask)
    is_small = dtype in TYPES and codes.shape[0] * max(columns, y.shape[1]) <= _CHUNK
    if is_small and (is_hashed or _is_whole(y, spec, mask)):  # at once
        value, sketched = int(seed), y.to(wide) if mask is None else y
        if not is_hashed and mask is not None:
            sketched = y.index_select(0, mask.index).to(wide)
        if is_hashed:
            sketched = native.countsketch(_contiguous_rows(y), value, spec.rows, 0, spec.rows, _valid_rows(mask), wide)
        is_last = packing.is_normal(spec.bits) or codes.shape[0] > y.shape[1]  # the smaller of Z and the product
        if packing.is_normal(spec.bits):
            values = _decoded(codes, scales, bits, columns, wide)
        else:
            values = codes.new_empty(codes.shape[0], columns, dtype=wide if is_last else torch.float32)
            native.unpack(codes.data_ptr(), scales.data_ptr(), int(bits), value, values, rotated=is_last)
        product = torch.mm(sketched.T, values.to(wide))
        return (_unrotate(product, seed, bits, columns) if is_last else product).to(dtype)
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
    unpacked = decoded_rows(codes, scales, seed, bits, columns, wide)
    like, width = (
        y if y.dtype == wide else y.new_empty(0, y.shape[1], dtype=wide),
        packing.rotated_columns(columns, bits),
    )
    product = plain.product_of_parts(like, codes.shape[0], width, sketched, unpacked)
    return _unrotate(product, seed, bits, columns).to(dtype)


def pack(matrix: Tensor, bits: int, seed: Tensor, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    rows, columns = matrix.shape
    if matrix.dtype not in TYPES or rows * columns > _CHUNK:
        out = out or packing.empty_packed(rows, columns, packing.check_bits(bits), seed)
        return _encode_parts(lambda begin, end: matrix[begin:end], (rows, columns), bits, seed, out)
    codes, scales = out or packing.empty_packed(rows, columns, packing.check_bits(bits), seed)
    native.pack(_contiguous_rows(matrix), bits, int(seed), codes.data_ptr(), scales.data_ptr(), rows)
    return codes, scales


def stored_matrix(x: Tensor, bits: float, seed: int | None) -> Any:
    """Return the bytes of :func:`rmm_linear.ops.convolutions.encode_matrix`."""
    (_, codes, scales), size = _layout(*x.shape, bits)
    stored = new_stored(x, size, (codes, scales))
    seed, base, levels = write_seed(stored, seed), stored.data_ptr(), LEVELS.get(bits)
    native.pack(_contiguous_rows(x), int(bits), seed, base + codes, base + scales, x.shape[0], 0, None, levels)
    return stored


def read_matrix(stored: Tensor, rows: int, columns: int, bits: float, dtype: torch.dtype) -> Any:
    """Return what :func:`rmm_linear.ops.convolutions.decode_matrix` does, of symmetric codes."""
    if dtype not in TYPES or packing.is_normal(bits):
        return NotImplemented
    (_, *places), _ = _layout(rows, columns, bits)
    codes, scales = (stored.data_ptr() + place for place in places)
    matrix = stored.new_empty(rows, columns, dtype=dtype)
    native.unpack(codes, scales, int(bits), read_seed(stored), matrix, rotated=False)
    return matrix


@functools.lru_cache(maxsize=4096)
def _layout(rows: int, columns: int, bits: float) -> tuple[list[int], int]:
    return offsets((SEED, *packing.encoded_parts(rows, columns, packing.check_code(bits))))


def encode(matrix: Tensor, bits: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    return _encode_parts(lambda begin, end: matrix[begin:end], (matrix.shape[0], matrix.shape[1]), bits, seed)


def _encode_parts(
    part: Callable[[int, int], Tensor],
    shape: tuple[int, int],
    bits: float,
    seed: Tensor,
    out: tuple[Tensor, Tensor] | None = None,
    chunk: int = _CHUNK,
) -> tuple[Tensor, Tensor]:
    """Encode some rows at a time; with ``out``, whose shapes are those of symmetric codes, pack them."""
    codes, scales = out or packing.empty_encoded(*shape, packing.check_code(bits), seed)
    levels = None if out else LEVELS.get(bits)
    for rows in packing.row_parts(*shape, seed.device, chunk):
        values = part(rows.start, rows.stop)
        values = _contiguous_rows(values if values.dtype in TYPES else values.float())
        places = codes[rows].data_ptr(), scales[rows].data_ptr()
        native.pack(values, bits, int(seed), *places, rows.stop - rows.start, rows.start, None, levels)
    return codes, scales


@without_autocast
def unpack(
    codes: Tensor,
    scales: Tensor,
    seed: Tensor,
    bits: int,
    columns: int,
    dtype: torch.dtype,
    *,
    rotated: bool = False,
) -> Tensor:
    unpacked = unpacked_rows(codes, scales, seed, bits, columns, dtype, rotated=rotated)
    if dtype in TYPES:
        return unpacked(0, len(codes))
    matrix = codes.new_empty(len(codes), columns, dtype=dtype)
    for rows in packing.row_parts(len(codes), columns, codes.device, _CHUNK):
        matrix[rows] = unpacked(rows.start, rows.stop)
    return matrix


@without_autocast
def decode(
    codes: Tensor, scales: Tensor, seed: Tensor, bits: float, columns: int, dtype: torch.dtype, *, rotated: bool = False
) -> Tensor:
    if not packing.is_normal(bits):
        return unpack(codes, scales, seed, int(bits), columns, dtype, rotated=rotated)
    matrix = _decoded(codes.contiguous(), scales.contiguous(), bits, columns, dtype)
    return matrix if rotated else _unrotate(matrix, seed, bits, columns)


def _decoded(codes: Tensor, scales: Tensor, bits: float, columns: int, dtype: torch.dtype) -> Tensor:
    """The rows of a normal code, rotated. codes, scales: contiguous."""
    made = dtype if dtype in TYPES else torch.float32
    matrix = codes.new_empty(codes.shape[0], packing.rotated_columns(columns, bits), dtype=made)
    native.decode_normal(codes.data_ptr(), scales.data_ptr(), LEVELS[bits], matrix)
    return matrix.to(dtype)


def decoded_rows(
    codes: Tensor, scales: Tensor, seed: Tensor, bits: float, columns: int, dtype: torch.dtype
) -> Callable[[int, int], Tensor]:
    """Return a function of ``begin`` and ``end`` that decodes rows, which stay rotated."""
    if packing.is_normal(bits):
        return lambda begin, end: _decoded(codes[begin:end], scales[begin:end], bits, columns, dtype)
    return unpacked_rows(codes, scales, seed, int(bits), columns, dtype, rotated=True)


def unpacked_rows(
    codes: Tensor,
    scales: Tensor,
    seed: Tensor,
    bits: int,
    columns: int,
    dtype: torch.dtype,
    *,
    rotated: bool = False,
) -> Callable[[int, int], Tensor]:
    """Return a function of ``begin`` and ``end`` that unpacks rows as :func:`rmm_linear.packing.unpack` does."""
    codes, scales, value = codes.contiguous(), scales.contiguous(), int(seed)
    made = dtype if dtype in TYPES else torch.float32

    def part(begin: int, end: int) -> Tensor:
        values = codes.new_empty(end - begin, columns, dtype=made)
        native.unpack(codes.data_ptr(), scales.data_ptr(), bits, value, values, begin, rotated=rotated)
        return values.to(dtype)

    return part


def _unrotate(matrix: Tensor, seed: Tensor, bits: float, columns: int) -> Tensor:
    """As :func:`rmm_linear.packing.unrotate`, in place where possible."""
    if matrix.dtype not in TYPES or not matrix.is_contiguous():
        return packing.unrotate(matrix, seed, bits, columns)
    if not packing.is_normal(bits):
        native.unrotate(matrix, int(seed))
        return matrix
    native.unrotate_normal(matrix, int(seed))
    return matrix if matrix.shape[1] == columns else matrix[:, :columns].contiguous()


def sample_rows(x: Tensor, seed: Tensor, spec: SaveSpec, expected: Tensor | None, mask: TokenMask | None) -> RowSample:
    """Sample rows as :func:`rmm_linear.ops.plain.sample_rows` does."""
    return plain.sample_rows(x, seed, spec, expected, mask, native.philox)


def packed_rows(matrix: Tensor, seed: Tensor, sample: RowSample, bits: float) -> tuple[Tensor, Tensor]:
    """Pack sampled rows as :func:`rmm_linear.ops.plain.packed_rows` does."""
    return _encode_parts(_row_parts(matrix, sample), (len(sample.index), matrix.shape[1]), bits, seed)


def directed(
    x: Tensor, bits: float, seed: Tensor, basis: Tensor, index: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return plain.directed_by(x, bits, seed, basis, index, _coder())


def directed_product(
    y: Tensor, saved: Sequence[Tensor], bits: float, columns: int, index: Tensor | None = None
) -> Tensor:
    """Return what :func:`rmm_linear.ops.plain.directed_product` does."""
    return plain.directed_product_by(y, saved, bits, columns, index, _coder())


@functools.cache
def _coder() -> plain.Coder:
    encode_parts = functools.partial(_encode_parts, chunk=_CHUNK >> 2)  # what is read at once comes from the cache
    return plain.Coder(encode_parts, encode, decoded_rows, decode, _rotate, _unrotate)


def _rotate(matrix: Tensor, seed: Tensor, bits: float) -> Tensor:
    size = NORMAL_GROUP if packing.is_normal(bits) else packing.GROUP
    counters = torch.arange((2 if packing.is_normal(bits) else 1) * size // 32, device=seed.device)
    signs = unpack_signs(native.philox(seed, counters, packing.ROUNDING_STREAM)[2]).view(-1, size).to(torch.float32)
    rotation = signs[0].unsqueeze(1) * _hadamard(size)
    if not packing.is_normal(bits):
        return rotate_groups(matrix, rotation)
    return normal.rotate(normal.padded(matrix), rotation @ (signs[1].unsqueeze(1) * _hadamard(size)))


@functools.cache
def _hadamard(size: int) -> Tensor:
    return hadamard(size, torch.device("cpu"))


def gather_rows(matrix: Tensor, sample: RowSample) -> Tensor:
    """Return SᵀM for sampled rows as :func:`rmm_linear.sketches.gather` does."""
    index, scale = sample.index.long().contiguous(), sample.scale.float().contiguous()
    return native.gather_rows(_contiguous_rows(matrix), index, scale)


def _row_parts(matrix: Tensor, sample: RowSample) -> Callable[[int, int], Tensor]:
    if matrix.dtype not in TYPES:
        return plain.row_parts(matrix, sample)
    return lambda begin, end: gather_rows(matrix, RowSample(sample.index[begin:end], sample.scale[begin:end]))
