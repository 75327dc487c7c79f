"""What kernels pack and unpack with: words, the rotation, and the codes of groups of 64 columns, or a short last one.

Whole groups are made for the number of instructions: words are drawn once per tile and shared by its lanes, the signed
Hadamard matrix is made once per program, codes are found and joined in the mantissas of float32 numbers, and half types
are multiplied as they are, which is exact. The last group of a row whose columns are no multiple of 64 is not rotated,
and takes a path of its own.
"""

import triton
import triton.language as tl

from .draws import words

GROUP = 64
ROWS = 64  # of a tile of what multiplies nothing
PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}
_STREAM = tl.constexpr(3)
_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0


@triton.jit
def program_place(n_columns, n_tiles, B_K: tl.constexpr):
    """The group of a program, int32, its columns, int32 (64,), and the first row of its tiles, int64."""
    n_groups = tl.cdiv(n_columns, 64)
    i_g = tl.program_id(0) % n_groups
    first = (tl.program_id(0) // n_groups).to(tl.int64) * (B_K * n_tiles)
    return i_g, i_g * 64 + tl.arange(0, 64), first


@triton.jit
def scale_line(b_number):
    """Where a number ≥ 0 lies among the scales of bytes, float32; not cut off at the first and the last."""
    b_log = tl.log2(tl.maximum(b_number, 1.1754943508222875e-38))
    return tl.minimum(tl.maximum(8.0 * b_log + 153.0, 0.25 * b_log + 13.5), 0.25 * b_log + 246.0)


@triton.jit
def _scale_byte(b_least):
    """The byte, int32, of the least scale that is not below a number ≥ 0; 255 for what is not finite.

    Scales are eight to an octave from 2⁻¹⁸ to 2¹², four octaves apart beyond. The logarithm is good to 2⁻¹⁸.9 of the
    number, a smaller share than the margin that the number has.
    """
    b_line = tl.minimum(tl.maximum(tl.ceil(scale_line(b_least)), 1.0), 255.0)
    b_line = tl.where(b_least > 0, b_line, 0.0)
    return tl.where(b_least < float("inf"), b_line, 255.0).to(tl.int32)


@triton.jit
def power_of(b_byte):
    """The scale that a byte, int32, stands for; of 0 and 255 the number that would be next."""
    b_line = b_byte.to(tl.float32)
    return tl.exp2(tl.maximum(tl.minimum(0.125 * b_line - 19.125, 4.0 * b_line - 54.0), 4.0 * b_line - 984.0))


@triton.jit
def scale_of(b_byte):
    """The scale that a byte, int32, stands for; 0 and NaN too."""
    b_scale = tl.where(b_byte == 255, float("nan"), power_of(b_byte))
    return tl.where(b_byte == 0, 0.0, b_scale)


@triton.jit
def rotation(seed, DTYPE: tl.constexpr, BACK: tl.constexpr = False):
    """The signs of a group's columns, then the orthonormal Hadamard matrix, (64, 64); BACK undoes it."""
    o_j = tl.arange(0, 64)
    _, _, b_word, _ = words(seed, o_j.to(tl.int64) // 32, _STREAM)
    b_sign = ((b_word >> (o_j % 32).to(tl.uint32)) & 1).to(tl.int32)
    b_shared = o_j[:, None] & o_j[None, :]
    b_shared = b_shared ^ (b_shared >> 4)
    b_bit = (0x6996 >> (b_shared & 15)) ^ (b_sign[None, :] if BACK else b_sign[:, None])
    return (0x3E000000 | (b_bit << 31)).to(tl.float32, bitcast=True).to(DTYPE)


@triton.jit
def rotated(b_z, b_rotation, IEEE: tl.constexpr):
    """A tile times :func:`rotation`, float32; the matrix is exact in every dtype.

    A tile in the dtype of the matrix takes one product. One in float32 takes two, of what a number has in it and of the
    rest: 21 bits of tf32, 16 of bfloat16.
    """
    if b_rotation.dtype != tl.float32:
        if b_z.dtype == tl.float32:
            b_part = b_z.to(b_rotation.dtype)
            b_rest = (b_z - b_part.to(tl.float32)).to(b_rotation.dtype)
            return tl.dot(b_rest, b_rotation, tl.dot(b_part, b_rotation))
        else:
            return tl.dot(b_z, b_rotation)
    elif IEEE:
        return tl.dot(b_z.to(tl.float32), b_rotation, input_precision="ieee")
    else:
        b_high = (b_z.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        b_sum = tl.dot(b_high, b_rotation, input_precision="tf32")
        return tl.dot(b_z - b_high, b_rotation, b_sum, input_precision="tf32")


@triton.jit
def tile_words(seed, begin, i_g, B_K: tl.constexpr):
    """Words of the rows begin … begin + B_K − 1 and of the columns of group i_g, 23 bits, int32 (B_K,) and (64,).

    One Philox call per lane makes them, and all lanes read those that they need. seed, begin: int64 scalars. Backward
    passes load the seed for every tile: what follows from one that stays takes 12 to 57 registers of a thread.
    """
    o_w = tl.arange(0, 128)
    b_count = tl.where(o_w < 64, i_g * 64 + o_w, begin + (o_w - 64))
    b_row, b_column, _, _ = words(seed, b_count, _STREAM)
    b_word = (tl.where(o_w < 64, b_column, b_row) >> 9).to(tl.int32)
    return tl.gather(b_word, 64 + tl.arange(0, B_K), 0), tl.gather(b_word, tl.arange(0, 64), 0)


@triton.jit
def row_words(seed, o_k):
    """Words of any rows, as of :func:`tile_words`. o_k: int64 (B_K,)."""
    b_row, _, _, _ = words(seed, o_k, _STREAM)
    return (b_row >> 9).to(tl.int32)


@triton.jit
def dither(b_row, b_column, MIXED: tl.constexpr):
    """1 + u, float32 (B_K, 64): u is added to an element before it is rounded down.

    MIXED: whether the words of rows and columns are hashed, for estimates with products of two elements of a row.
    """
    if MIXED:
        b_word = (b_row[:, None] ^ b_column[None, :]).to(tl.uint32) * tl.full((), 0x9E3779B1, tl.uint32)
        b_word = (b_word ^ (b_word >> 15)) * tl.full((), 0x85EBCA6B, tl.uint32)
        return ((b_word >> 9) | _ONE).to(tl.float32, bitcast=True)
    else:
        return (b_row[:, None] ^ (b_column | _ONE)[None, :]).to(tl.float32, bitcast=True)


@triton.jit
def _joined(b_code, WIDTH: tl.constexpr):
    """The bytes of a plane, (B_K, 8 · WIDTH): byte i holds the elements i, i + h, …. b_code: int32 (B_K, 64)."""
    if WIDTH == 8:
        return b_code.to(tl.uint8)
    else:
        PER: tl.constexpr = 8 // WIDTH
        b_part = tl.reshape(b_code, (b_code.shape[0], PER, 8 * WIDTH))
        return tl.sum(b_part << (tl.arange(0, PER) * WIDTH)[None, :, None], axis=1).to(tl.uint8)


@triton.jit
def _store_group(
    b_z, b_row, b_column, o_k, m_k, i_g, row_bytes, n_groups, p_codes, p_scales,
    BITS: tl.constexpr, MIXED: tl.constexpr = False,
):  # fmt: skip
    """Round a whole group of a tile, which is rotated, and store its codes and scales.

    b_z: float32 (B_K, 64). b_row, b_column: see tile_words. o_k: int64 (B_K,), rows of the packed matrix. m_k: rows
    that exist. i_g: number of the group. row_bytes, n_groups: bytes of a row of codes, and of scales. p_codes: uint8
    (K, row_bytes). p_scales: uint8 (K, n_groups).
    """
    MIDDLE: tl.constexpr = (2**BITS - 1) / 2
    SHARE: tl.constexpr = (1 + 2**-18) / ((2**BITS - 1) / 2)
    # Of a NaN or an infinity, the rotation makes NaN or infinite of all 64.
    b_byte = _scale_byte(tl.max(tl.abs(b_z), axis=1) * SHARE)
    tl.store(p_scales + o_k * n_groups + i_g, b_byte.to(tl.uint8), mask=m_k)
    b_inverse = 1.0 / power_of(b_byte)
    # The sum is at least 1/2 and rounded to a whole number, by the last bit of 3 · 2²²: that of the code.
    b_code = b_z * b_inverse[:, None] + (MIDDLE - 0.5) + dither(b_row, b_column, MIXED)
    b_code = (b_code + 12582911.0).to(tl.int32, bitcast=True)
    p_bytes = p_codes + o_k * row_bytes + i_g * (8 * BITS)
    if BITS == 3:
        p_low, p_high = p_bytes[:, None] + tl.arange(0, 16)[None, :], p_bytes[:, None] + 16 + tl.arange(0, 8)[None, :]
        tl.store(p_low, _joined(b_code & 3, 2), mask=m_k[:, None])
        tl.store(p_high, _joined((b_code >> 2) & 1, 1), mask=m_k[:, None])
    else:
        tl.store(p_bytes[:, None] + tl.arange(0, 8 * BITS)[None, :], _joined(b_code, BITS), mask=m_k[:, None])


@triton.jit
def _spread(b_bytes, WIDTH: tl.constexpr, PLACE: tl.constexpr):
    """Codes of a plane of WIDTH bits, (B_K, 64) from (B_K, 8 · WIDTH), moved to bit PLACE of int32."""
    PER: tl.constexpr = 8 // WIDTH
    b_wide = b_bytes.to(tl.int32)[:, None, :] << (PLACE - tl.arange(0, PER) * WIDTH)[None, :, None]
    return tl.reshape(b_wide, (b_bytes.shape[0], 64)) & ((2**WIDTH - 1) << PLACE)


@triton.jit
def _load_group(
    p_codes, p_scales, b_row, b_column, o_k, m_k, i_g, row_bytes, n_groups,
    BITS: tl.constexpr, MIXED: tl.constexpr = False,
):  # fmt: skip
    """A whole group of some rows, still rotated and by its scales, float32 (B_K, 64), and these, float32 (B_K,).

    Arguments as for _store_group. Scales are 0 for rows masked out.
    """
    p_bytes = p_codes + o_k * row_bytes + i_g * (8 * BITS)
    # Codes lie in the mantissas of 256 … 512, in steps of 2¹⁵.
    if BITS == 3:
        p_low, p_high = p_bytes[:, None] + tl.arange(0, 16)[None, :], p_bytes[:, None] + 16 + tl.arange(0, 8)[None, :]
        b_code = _spread(tl.load(p_low, mask=m_k[:, None], other=0), 2, 15)
        b_code |= _spread(tl.load(p_high, mask=m_k[:, None], other=0), 1, 17)
    else:
        p_bytes = p_bytes[:, None] + tl.arange(0, 8 * BITS)[None, :]
        b_code = _spread(tl.load(p_bytes, mask=m_k[:, None], other=0), BITS, 15)
    b_byte = tl.load(p_scales + o_k * n_groups + i_g, mask=m_k, other=0).to(tl.int32)
    b_code = (b_code | 0x43800000).to(tl.float32, bitcast=True) - (256 + (2**BITS - 1) / 2 - 1.5)
    return b_code - dither(b_row, b_column, MIXED), scale_of(b_byte)


@triton.jit
def _store_plane(b_codes, size, m_k, p_bytes, WIDTH: tl.constexpr):
    """Store codes of WIDTH bits of a short group, float32 (B_K, 64); p_bytes: of the first byte of each row.

    Byte i holds the elements i, i + h, …, h bytes in all: a product with powers of two, which is exact.
    """
    h = (size * WIDTH + 7) // 8
    o_j = tl.arange(0, 64)
    o_b = tl.arange(0, 8 * WIDTH if WIDTH > 1 else 16)  # a product has 16 columns at least
    if WIDTH < 8:
        m_j = o_j < size
        b_power = tl.exp2(tl.where(m_j, o_j // h * WIDTH, 0).to(tl.float32))
        b_join = tl.where(((o_j % h)[:, None] == o_b[None, :]) & m_j[:, None], b_power[:, None], 0.0)
        b_codes = tl.dot(b_codes.to(tl.float16), b_join.to(tl.float16))
    b_bytes = b_codes.to(tl.int32).to(tl.uint8)
    tl.store(p_bytes[:, None] + o_b[None, :], b_bytes, mask=m_k[:, None] & (o_b < h)[None, :])


@triton.jit
def _store_short(
    b_z, b_row, b_column, o_k, m_k, i_g, size, row_bytes, n_groups, p_codes, p_scales,
    BITS: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """As _store_group, of a last group of ``size`` columns, which is not rotated."""
    MIDDLE: tl.constexpr = (2**BITS - 1) / 2
    SHARE: tl.constexpr = (1 + 2**-18) / ((2**BITS - 1) / 2)
    b_z = tl.where((tl.arange(0, 64) < size)[None, :], b_z.to(tl.float32), 0.0)
    # The order of absolute values is that of their bits, of which a NaN has the largest.
    b_top = tl.max(b_z.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    b_byte = _scale_byte(b_top.to(tl.float32, bitcast=True) * SHARE)
    tl.store(p_scales + o_k * n_groups + i_g, b_byte.to(tl.uint8), mask=m_k)
    b_codes = b_z * (1.0 / power_of(b_byte))[:, None] + (MIDDLE - 1.0) + dither(b_row, b_column, MIXED)
    b_codes = tl.where((b_byte == 255)[:, None], 0.0, tl.floor(b_codes))  # a NaN would reach the others' bytes
    p_bytes = p_codes + o_k * row_bytes + i_g * (8 * BITS)
    if BITS == 3:
        b_high = tl.floor(b_codes * 0.25)
        _store_plane(b_codes - 4 * b_high, size, m_k, p_bytes, 2)
        _store_plane(b_high, size, m_k, p_bytes + (size * 2 + 7) // 8, 1)
    else:
        _store_plane(b_codes, size, m_k, p_bytes, BITS)


@triton.jit
def _load_plane(p_bytes, size, m_k, WIDTH: tl.constexpr):
    """Codes of WIDTH bits, int32 (B_K, 64), as _store_plane stored them."""
    o_j = tl.arange(0, 64)
    h = (size * WIDTH + 7) // 8
    m_z = m_k[:, None] & (o_j < size)[None, :]
    b_bytes = tl.load(p_bytes[:, None] + (o_j % h)[None, :], mask=m_z, other=0).to(tl.int32)
    return (b_bytes >> (o_j // h * WIDTH)[None, :]) & (2**WIDTH - 1)


@triton.jit
def _load_short(
    p_codes, p_scales, b_row, b_column, o_k, m_k, i_g, size, row_bytes, n_groups,
    BITS: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """As _load_group, of a last group of ``size`` columns, with 0 in the columns beyond."""
    p_bytes = p_codes + o_k * row_bytes + i_g * (8 * BITS)
    if BITS == 3:
        b_codes = _load_plane(p_bytes, size, m_k, 2) + 4 * _load_plane(p_bytes + (size * 2 + 7) // 8, size, m_k, 1)
    else:
        b_codes = _load_plane(p_bytes, size, m_k, BITS)
    b_byte = tl.load(p_scales + o_k * n_groups + i_g, mask=m_k, other=0).to(tl.int32)
    b_z = b_codes.to(tl.float32) - ((2**BITS - 1) / 2 - 1.5) - dither(b_row, b_column, MIXED)
    return tl.where((tl.arange(0, 64) < size)[None, :], b_z, 0.0), scale_of(b_byte)


@triton.jit
def store_packed(
    b_z, b_rotation, b_row, b_column, o_k, m_k, i_g, n_columns, row_bytes, p_codes, p_scales,
    BITS: tl.constexpr, IEEE: tl.constexpr, TAIL: tl.constexpr, MIXED: tl.constexpr = False,
):  # fmt: skip
    """Pack any group of a tile: rotate it, or not if it is a short one.

    b_z: (B_K, 64). b_rotation: see rotation. TAIL: whether the last group is a short one. The others: see _store_group.
    """
    n_groups = tl.cdiv(n_columns, 64)
    if TAIL:
        size = n_columns - i_g * 64
        if size < 64:
            _store_short(b_z, b_row, b_column, o_k, m_k, i_g, size, row_bytes, n_groups, p_codes, p_scales, BITS, MIXED)
        else:
            b_whole = rotated(b_z, b_rotation, IEEE)
            _store_group(b_whole, b_row, b_column, o_k, m_k, i_g, row_bytes, n_groups, p_codes, p_scales, BITS, MIXED)
    else:
        b_whole = rotated(b_z, b_rotation, IEEE)
        _store_group(b_whole, b_row, b_column, o_k, m_k, i_g, row_bytes, n_groups, p_codes, p_scales, BITS, MIXED)


@triton.jit
def load_packed(
    p_codes, p_scales, b_rotation, b_row, b_column, o_k, m_k, i_g, n_columns, row_bytes,
    BITS: tl.constexpr, IEEE: tl.constexpr, TAIL: tl.constexpr, MIXED: tl.constexpr = False,
):  # fmt: skip
    """Any group of some rows, float32 (B_K, 64), and its scales, float32 (B_K,); 0 for columns and rows masked out.

    b_rotation: BACK, in the dtype that the group is multiplied in before it is scaled. No element is beyond 128 then:
    float16 rounds it by 2⁻¹². The others: see store_packed.
    """
    n_groups = tl.cdiv(n_columns, 64)
    if TAIL:
        size = n_columns - i_g * 64
        if size < 64:
            b_z, b_scale = _load_short(
                p_codes, p_scales, b_row, b_column, o_k, m_k, i_g, size, row_bytes, n_groups, BITS, MIXED
            )
        else:
            b_z, b_scale = _load_group(
                p_codes, p_scales, b_row, b_column, o_k, m_k, i_g, row_bytes, n_groups, BITS, MIXED
            )
            b_z = rotated(b_z.to(b_rotation.dtype), b_rotation, IEEE)
    else:
        b_z, b_scale = _load_group(p_codes, p_scales, b_row, b_column, o_k, m_k, i_g, row_bytes, n_groups, BITS, MIXED)
        b_z = rotated(b_z.to(b_rotation.dtype), b_rotation, IEEE)
    return b_z * b_scale[:, None], b_scale


@triton.jit
def store_codes(
    b_code, o_k, m_k, i_g, n_columns, row_bytes, p_codes, WIDTH: tl.constexpr, TAIL: tl.constexpr
):  # fmt: skip
    """Store codes alone of any group: the lowest WIDTH bits of int32 (B_K, 64). The others: see store_packed."""
    p_bytes = p_codes + o_k * row_bytes + i_g * (8 * WIDTH)
    if TAIL:
        size = n_columns - i_g * 64
        if size < 64:
            _store_plane((b_code & (2**WIDTH - 1)).to(tl.float32), size, m_k, p_bytes, WIDTH)
        else:
            p_tile = p_bytes[:, None] + tl.arange(0, 8 * WIDTH)[None, :]
            tl.store(p_tile, _joined(b_code, WIDTH), mask=m_k[:, None])
    else:
        tl.store(p_bytes[:, None] + tl.arange(0, 8 * WIDTH)[None, :], _joined(b_code, WIDTH), mask=m_k[:, None])


@triton.jit
def load_codes(o_k, m_k, i_g, n_columns, row_bytes, p_codes, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    """What store_codes has stored, float32 (B_K, 64): 256 and the code."""
    p_bytes = p_codes + o_k * row_bytes + i_g * (8 * WIDTH)
    if TAIL:
        size = n_columns - i_g * 64
        if size < 64:
            b_code = _load_plane(p_bytes, size, m_k, WIDTH) << 15
        else:
            p_tile = p_bytes[:, None] + tl.arange(0, 8 * WIDTH)[None, :]
            b_code = _spread(tl.load(p_tile, mask=m_k[:, None], other=0), WIDTH, 15)
    else:
        p_tile = p_bytes[:, None] + tl.arange(0, 8 * WIDTH)[None, :]
        b_code = _spread(tl.load(p_tile, mask=m_k[:, None], other=0), WIDTH, 15)
    return (b_code | 0x43800000).to(tl.float32, bitcast=True)


@triton.jit
def store_tile(
    b_z, seed, begin, m_k, i_d, n_columns, row_bytes, p_z, p_scales,
    BITS: tl.constexpr, IEEE: tl.constexpr, TAIL: tl.constexpr, B_K: tl.constexpr, B_D: tl.constexpr,
):  # fmt: skip
    """Store a tile of a sketch, packed if BITS is not 0.

    b_z: float32 (B_K, B_D). begin: int64 scalar, the first row. m_k: rows that exist. i_d: int64, number of the tile
    among the columns. p_z: (K, n_columns), or codes. The others: see store_packed.
    """
    o_k = begin + tl.arange(0, B_K)
    if BITS == 0:
        o_d = i_d * B_D + tl.arange(0, B_D)
        p_out = p_z + o_k[:, None] * n_columns + o_d[None, :]
        tl.store(p_out, b_z.to(p_z.dtype.element_ty), mask=m_k[:, None] & (o_d < n_columns)[None, :])
    else:
        b_row, b_column = tile_words(seed, begin, i_d, B_K)
        b_rotation = rotation(seed, tl.float32)
        store_packed(
            b_z, b_rotation, b_row, b_column, o_k, m_k, i_d, n_columns, row_bytes, p_z, p_scales, BITS, IEEE, TAIL
        )
