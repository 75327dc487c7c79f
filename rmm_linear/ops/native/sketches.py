"""Sketches, sampled rows and packing with the C library: its random numbers always, its loops but for float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rmm_linear import packing, sketches
from rmm_linear._support.autocast import without_autocast
from rmm_linear.backends import native
from rmm_linear.backends.native import transforms
from rmm_linear.backends.native.library import TYPES
from rmm_linear.ops import plain
from rmm_linear.packing import ROUNDING_STREAM, RoundingNoise
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
    return lambda begin, end: native.countsketch(source, seed, rows, begin, end, index, dtype)


def _transformed(matrix: Tensor, seed: Tensor, kind: str, rows: int, mask: TokenMask | None) -> Tensor | None:
    """The sketch by a transform; None if no row is left out, or for a length that the library does not transform."""
    tokens = matrix.shape[0]
    count, size = tokens if mask is None else int(mask.count), next_power_of_two(max(tokens, 1))
    if count <= rows or (kind != "hadamard" and size != tokens):
        return None
    places = seed.new_full((size,), -1)
    places[:count] = torch.arange(count, device=seed.device) if mask is None else mask.order[:count]
    signs = seed.new_zeros(size, dtype=torch.float32)
    signs[:tokens] = random_signs(seed, tokens, generator=native.philox)
    index = sample(seed, size, rows, generator=native.philox)
    return transforms.sampled_transform(_contiguous_rows(matrix), kind, index, places, signs)


def _is_hashed(matrix: Tensor, kind: str, rows: int, mask: TokenMask | None) -> bool:
    return kind == "countsketch" and rows < (matrix.shape[0] if mask is None else int(mask.count))


def _valid_rows(mask: TokenMask | None) -> Tensor | None:
    return None if mask is None else mask.order[: int(mask.count)]


def _contiguous_rows(matrix: Tensor) -> Tensor:
    """The matrix with the elements of every row side by side, as the C library needs them."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def packed_sketch(matrix: Tensor, seed: Tensor, spec: SaveSpec, mask: TokenMask | None) -> tuple[Tensor, Tensor]:
    """Return pack(SᵀM) as :func:`rmm_linear.ops.plain.packed_sketch` does: a CountSketch is packed row by row."""
    bits = spec.bits or 0
    if matrix.dtype not in TYPES or not _is_hashed(matrix, spec.kind, spec.rows, mask):
        if matrix.dtype == torch.float16 and spec.kind != "countsketch":  # whose rows are those of the matrix then
            matrix = matrix.float()
        parts = _sketch_parts(matrix, kind=spec.kind, seed=seed, rows=spec.rows, block=spec.block, mask=mask)
        return _pack_parts(parts, (spec.kept_rows(matrix.shape[0]), matrix.shape[1]), bits, seed)
    source, index = _contiguous_rows(matrix), _valid_rows(mask)
    tokens, columns = (source if index is None else index).shape[0], source.shape[1]
    signs, shifts = native.signs_and_shifts(seed, tokens, spec.rows)
    codes, qparams = packing.empty_packed(spec.rows, columns, packing.check_bits(bits), seed)
    words, a, c = native.noise_words(seed, ROUNDING_STREAM, spec.rows, columns)
    hashing = shifts.shape[0], shifts.data_ptr(), signs.data_ptr()
    if not native.pack_rows(source, bits, words.data_ptr(), a, c, codes, qparams, hashing, index):
        packing.mark_infinite(qparams)
    return codes, qparams


def unpacked_product(
    y: Tensor, codes: Tensor, qparams: Tensor, seed: Tensor, spec: SaveSpec, columns: int, mask: TokenMask | None
) -> Tensor:
    """Return (SᵀY)ᵀ unpack(Z) as :func:`rmm_linear.ops.plain.unpacked_product` does."""
    dtype, wide = y.dtype, torch.float32 if y.dtype == torch.float16 else y.dtype
    if dtype != wide and not _is_hashed(y, spec.kind, spec.rows, mask):
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
    rows, codes, qparams = codes.shape[0], codes.contiguous(), qparams.contiguous()
    words, a, c = native.noise_words(seed, ROUNDING_STREAM, rows, columns)

    def unpacked(begin: int, end: int) -> Tensor:
        values = codes.new_empty(end - begin, columns, dtype=wide if wide in TYPES else torch.float32)
        native.unpack_rows(codes, qparams, spec.bits or 0, 0, a, c, begin, values)
        return values.to(wide)

    like = y if y.dtype == wide else y.new_empty(0, y.shape[1], dtype=wide)
    product = plain.product_of_parts(like, rows, columns, sketched, unpacked)
    if product.dtype != torch.float32 or not product.is_contiguous():
        return packing.unrotate(product, seed).to(dtype)
    native.unrotate(product, words[:64])
    return product.to(dtype)


def pack(matrix: Tensor, bits: int, seed: Tensor, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Pack as :func:`rmm_linear.packing.pack` does."""
    rows, columns = matrix.shape
    if matrix.dtype not in TYPES or rows * columns > _CHUNK:
        return _pack_parts(lambda begin, end: matrix[begin:end], (rows, columns), bits, seed, out)
    codes, qparams = out or packing.empty_packed(rows, columns, packing.check_bits(bits), seed)
    matrix, (words, a, c) = _contiguous_rows(matrix), native.noise_words(seed, ROUNDING_STREAM, rows, columns)
    if not native.pack_rows(matrix, bits, words.data_ptr(), a, c, codes, qparams):
        packing.mark_infinite(qparams)
    return codes, qparams


def _pack_parts(
    part: Callable[[int, int], Tensor],
    shape: tuple[int, int],
    bits: int,
    seed: Tensor,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    codes, qparams = out or packing.empty_packed(*shape, packing.check_bits(bits), seed)
    noise = _rounding_noise(seed, *shape)
    for rows in packing.row_parts(*shape, seed.device, _CHUNK):
        values = part(rows.start, rows.stop)
        values = _contiguous_rows(values if values.dtype in TYPES else values.float())
        found = qparams[rows]
        if not native.pack(values, bits, noise.signs, noise.rows[rows], noise.columns, codes[rows], found):
            packing.mark_infinite(found)
    return codes, qparams


def _rounding_noise(seed: Tensor, rows: int, columns: int) -> RoundingNoise:
    return RoundingNoise(*native.rounding_noise(seed, ROUNDING_STREAM, rows, columns))


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
    noise = _rounding_noise(seed, len(codes), columns)
    unpacked = _unpack_parts(codes, qparams, noise, bits, dtype)
    if dtype in TYPES:
        matrix = unpacked(0, len(codes))
    else:
        matrix = codes.new_empty(len(codes), columns, dtype=dtype)
        for rows in packing.row_parts(len(codes), columns, codes.device, _CHUNK):
            matrix[rows] = unpacked(rows.start, rows.stop)
    return matrix if rotated else _unrotate(matrix, seed, noise)


def _unpack_parts(
    codes: Tensor, qparams: Tensor, noise: RoundingNoise, bits: int, dtype: torch.dtype
) -> Callable[[int, int], Tensor]:
    """As :func:`rmm_linear.packing.unpack_parts`."""

    def part(begin: int, end: int) -> Tensor:
        made = dtype if dtype in TYPES else torch.float32
        values, rows = codes.new_empty(end - begin, len(noise.columns), dtype=made), slice(begin, end)
        stored = codes[rows].contiguous(), qparams[rows].contiguous()
        native.unpack(*stored, bits, noise.rows[rows], noise.columns, values)
        return values.to(dtype)

    return part


def unpacked_rows(
    codes: Tensor, qparams: Tensor, seed: Tensor, bits: int, columns: int, dtype: torch.dtype
) -> Callable[[int, int], Tensor]:
    """Unpack a matrix as :func:`unpack` does, some rows at a time.

    Args:
        codes: See :func:`rmm_linear.packing.unpack`, as the following ones.
        qparams: Offset and scale of every group.
        seed: The seed they were packed with.
        bits: 8, 4 or 2.
        columns: Columns of the matrix.
        dtype: dtype of the result.

    Returns:
        A function of ``begin`` and ``end`` that returns the rows begin … end − 1.
    """
    codes, qparams = codes.contiguous(), qparams.contiguous()
    words, a, c = native.noise_words(seed, ROUNDING_STREAM, codes.shape[0], columns)

    def part(begin: int, end: int) -> Tensor:
        values = codes.new_empty(end - begin, columns, dtype=torch.float32)
        native.unpack_rows(codes, qparams, bits, words.data_ptr(), a, c, begin, values)
        return values.to(dtype)

    return part


def _unrotate(matrix: Tensor, seed: Tensor, noise: RoundingNoise) -> Tensor:
    """As :func:`rmm_linear.packing.unrotate`, in place where possible."""
    if matrix.dtype != torch.float32 or not matrix.is_contiguous():
        return packing.unrotate(matrix, seed)
    native.unrotate(matrix, noise.signs)
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
