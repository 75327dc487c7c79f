"""pack and unpack: 8, 4, 3 or 2 bits per element in groups of 64 columns; the epilogue that packs a sketch's tile."""

import torch
import triton
import triton.language as tl

from .draws import parity, words
from .launch import on_device, precision

GROUP = 64
_STREAM = tl.constexpr(3)


@triton.jit
def _eighth(b_k):
    """The mantissa of 2^(k / 8), k = 0 … 7, int32."""
    b_low = tl.where(b_k == 1, 0x0B95C2, tl.where(b_k == 2, 0x1837F0, tl.where(b_k == 3, 0x25FED7, 0)))
    b_high = tl.where(b_k == 5, 0x45672A, tl.where(b_k == 6, 0x5744FD, tl.where(b_k == 7, 0x6AC0C7, 0x3504F3)))
    return tl.where(b_k < 4, b_low, b_high)


@triton.jit
def _power_of(b_byte):
    """The scale that a byte, int32, stands for: 2^((byte − 9) / 8 − 18), four octaves apart below 9 and from 249 on.

    Of 0 and 255 it is the number that would be next.
    """
    b_fine = (((b_byte - 9) >> 3) + 109) << 23 | _eighth((b_byte - 9) & 7)
    b_coarse = (127 + 4 * b_byte - tl.where(b_byte < 9, 54, 984)) << 23
    return tl.where((b_byte < 9) | (b_byte >= 249), b_coarse, b_fine).to(tl.float32, bitcast=True)


@triton.jit
def _scale_of(b_byte):
    """The scale that a byte, int32, stands for; 0 and NaN too."""
    return tl.where(b_byte == 0, 0.0, tl.where(b_byte == 255, float("nan"), _power_of(b_byte)))


@triton.jit
def _scale_byte(b_least):
    """The byte, int32, of the least scale that is not below a number ≥ 0; 255 for what is not finite."""
    b_bits = b_least.to(tl.int32, bitcast=True)
    b_exponent = (b_bits >> 23) - 127
    b_mantissa = b_bits & 0x7FFFFF
    b_octave = b_exponent + (b_mantissa > 0).to(tl.int32)
    b_fine = 9 + 8 * (b_exponent + 18)
    for k in tl.static_range(8):
        b_fine += (b_mantissa > _eighth(tl.full((), k, tl.int32))).to(tl.int32)
    # Below 2⁻¹⁸ the coarse steps give the larger byte, from 2¹² on the smaller one.
    b_byte = tl.maximum(tl.maximum(b_fine, 9 - ((-18 - b_octave) >> 2)), 1)
    b_byte = tl.minimum(tl.minimum(b_byte, 249 + ((b_octave - 9) >> 2)), 255)
    return tl.minimum(b_byte, b_bits)  # 0 of 0


@triton.jit
def _code_bytes(n_columns, BITS: tl.constexpr):
    """Bytes of the codes of a row: 3 bits are a plane of 2 and one of 1."""
    if BITS == 3:
        return (n_columns * 2 + 7) // 8 + (n_columns + 7) // 8
    else:
        return (n_columns * BITS + 7) // 8


@triton.jit
def _hadamard():
    """The orthonormal Hadamard matrix of a group, float32 (64, 64)."""
    o_j = tl.arange(0, 64).to(tl.int64)
    return 0.125 - 0.25 * parity(o_j[:, None] & o_j[None, :]).to(tl.float32)


@triton.jit
def _rotation_signs(seed):
    """The signs of a group's columns before they are rotated, float32 (64,)."""
    o_j = tl.arange(0, 64)
    _, _, b_word, _ = words(seed, o_j.to(tl.int64) // 32, _STREAM)
    return 1.0 - 2.0 * ((b_word >> (o_j % 32).to(tl.uint32)) & 1).to(tl.float32)


@triton.jit
def _dither(seed, o_k, o_j, MIXED: tl.constexpr):
    """u, the number that is added to an element before it is rounded down: float32 (B_K, 64), in [0, 1).

    seed: int64 scalar. o_k: int64 (B_K,), rows of the packed matrix. o_j: int64 (64,), its columns. MIXED: whether the
    words of rows and columns are hashed, for estimates with products of two elements of a row.
    """
    b_row, _, _, _ = words(seed, o_k, _STREAM)
    _, b_column, _, _ = words(seed, o_j, _STREAM)
    b_words = ((b_row >> 9)[:, None] ^ (b_column >> 9)[None, :]).to(tl.uint32)
    if MIXED:
        b_words *= tl.full((), 0x9E3779B1, tl.uint32)
        b_words = (b_words ^ (b_words >> 15)) * tl.full((), 0x85EBCA6B, tl.uint32)
        b_words = b_words >> 9
    return b_words.to(tl.float32) * 1.1920928955078125e-07


@triton.jit
def _store_plane(b_codes, size, m_k, p_bytes, WIDTH: tl.constexpr):
    """Store codes of WIDTH bits, float32 (B_K, 64), of ``size`` columns; p_bytes: of the first byte of each row.

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
def store_packed(
    b_z, seed, o_k, m_k, i_g, n_columns, p_codes, p_scales,
    BITS: tl.constexpr, PRECISION: tl.constexpr, MIXED: tl.constexpr = False,
):  # fmt: skip
    """Round one group of a tile and store its codes and scales.

    b_z: float32 (B_K, 64). seed: int64 scalar. o_k: int64 (B_K,), rows of the packed matrix. m_k: rows that exist.
    i_g: number of the group. p_codes: uint8 (K, ⌈I·BITS/8⌉). p_scales: uint8 (K, ⌈I/64⌉).
    """
    MIDDLE: tl.constexpr = (2**BITS - 1) / 2
    SHARE: tl.constexpr = (1 + 2**-18) / ((2**BITS - 1) / 2)
    o_j = tl.arange(0, 64)
    size = tl.minimum(n_columns - i_g * 64, 64).to(tl.int32)
    m_j = o_j < size
    if size == 64:
        b_z = tl.dot(b_z, _rotation_signs(seed)[:, None] * _hadamard(), input_precision=PRECISION)
    b_z = tl.where(m_j[None, :], b_z, 0.0)
    # The order of absolute values is that of their bits, of which a NaN has the largest.
    b_top = tl.max(b_z.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    b_byte = _scale_byte(b_top.to(tl.float32, bitcast=True) * SHARE)
    tl.store(p_scales + o_k * tl.cdiv(n_columns, 64) + i_g, b_byte.to(tl.uint8), mask=m_k)

    b_scale = _power_of(b_byte)
    b_inverse = tl.math.div_rn(b_scale * 0 + 1, b_scale)
    b_codes = tl.floor(b_z * b_inverse[:, None] + MIDDLE + _dither(seed, o_k, i_g * 64 + o_j, MIXED))
    b_codes = tl.where((b_byte == 255)[:, None], 0.0, b_codes)  # a NaN times 0 would reach the others' bytes
    p_bytes = p_codes + o_k * _code_bytes(n_columns, BITS) + i_g * (8 * BITS)
    if BITS == 3:
        b_high = tl.floor(b_codes * 0.25)
        _store_plane(b_codes - 4 * b_high, size, m_k, p_bytes, 2)
        _store_plane(b_high, size, m_k, p_bytes + (size * 2 + 7) // 8, 1)
    else:
        _store_plane(b_codes, size, m_k, p_bytes, BITS)


@triton.jit
def store_tile(
    b_z, seed, o_k, m_k, i_d, n_columns, p_z, p_scales,
    BITS: tl.constexpr, PRECISION: tl.constexpr, B_D: tl.constexpr,
):  # fmt: skip
    """Store a tile of a sketch, packed if BITS is not 0.

    b_z: float32 (B_K, B_D). o_k: int64 (B_K,). m_k: rows that exist. i_d: int64, number of the tile among the columns.
    p_z: (K, n_columns), or codes. p_scales: see store_packed.
    """
    if BITS == 0:
        o_d = i_d * B_D + tl.arange(0, B_D)
        p_out = p_z + o_k[:, None] * n_columns + o_d[None, :]
        tl.store(p_out, b_z.to(p_z.dtype.element_ty), mask=m_k[:, None] & (o_d < n_columns)[None, :])
    else:
        store_packed(b_z, seed, o_k, m_k, i_d, n_columns, p_z, p_scales, BITS, PRECISION)


@triton.jit
def _pack_kernel(
    p_z, p_seed, p_codes, p_scales, n_rows, n_columns, stride,
    BITS: tl.constexpr, PRECISION: tl.constexpr, B_K: tl.constexpr,
):  # fmt: skip
    """One tile of B_K rows and one group.

    p_z: (K, I), rows ``stride`` apart. p_seed: int64 (1,). p_codes, p_scales: see store_packed.
    """
    i_g = tl.program_id(1).to(tl.int64)
    o_k = tl.program_id(0).to(tl.int64) * B_K + tl.arange(0, B_K)
    o_j = i_g * 64 + tl.arange(0, 64)
    m_k = o_k < n_rows
    m_z = m_k[:, None] & (o_j < n_columns)[None, :]
    b_z = tl.load(p_z + o_k[:, None] * stride + o_j[None, :], mask=m_z, other=0.0).to(tl.float32)
    store_packed(b_z, tl.load(p_seed), o_k, m_k, i_g, n_columns, p_codes, p_scales, BITS, PRECISION)


@triton.jit
def _load_plane(p_bytes, size, m_k, WIDTH: tl.constexpr):
    """Codes of WIDTH bits, int32 (B_K, 64), as _store_plane stored them."""
    o_j = tl.arange(0, 64)
    h = (size * WIDTH + 7) // 8
    m_z = m_k[:, None] & (o_j < size)[None, :]
    b_bytes = tl.load(p_bytes[:, None] + (o_j % h)[None, :], mask=m_z, other=0).to(tl.int32)
    return (b_bytes >> (o_j // h * WIDTH)[None, :]) & (2**WIDTH - 1)


@triton.jit
def load_rotated(p_codes, p_scales, seed, o_k, m_k, i_g, n_columns, BITS: tl.constexpr, MIXED: tl.constexpr = False):
    """One group of some rows, left rotated, float32 (B_K, 64), and its scales, float32 (B_K,); 0 for rows masked out.

    p_codes: uint8 (K, ⌈I·BITS/8⌉). p_scales: uint8 (K, ⌈I/64⌉). seed: int64 scalar. o_k: int64 (B_K,), rows of the
    packed matrix. m_k: rows that exist. i_g: int64, number of the group. The columns beyond the last are not zero.
    """
    MIDDLE: tl.constexpr = (2**BITS - 1) / 2
    o_j = tl.arange(0, 64)
    size = tl.minimum(n_columns - i_g * 64, 64).to(tl.int32)
    p_bytes = p_codes + o_k * _code_bytes(n_columns, BITS) + i_g * (8 * BITS)
    if BITS == 3:
        b_codes = _load_plane(p_bytes, size, m_k, 2) + 4 * _load_plane(p_bytes + (size * 2 + 7) // 8, size, m_k, 1)
    else:
        b_codes = _load_plane(p_bytes, size, m_k, BITS)
    b_byte = tl.load(p_scales + o_k * tl.cdiv(n_columns, 64) + i_g, mask=m_k, other=0).to(tl.int32)
    b_scale = _scale_of(b_byte)
    b_u = _dither(seed, o_k, i_g * 64 + o_j, MIXED)
    return (b_codes.to(tl.float32) - MIDDLE - (b_u - 0.5)) * b_scale[:, None], b_scale


@triton.jit
def load_packed(
    p_codes, p_scales, seed, o_k, m_k, i_g, n_columns,
    BITS: tl.constexpr, PRECISION: tl.constexpr, MIXED: tl.constexpr = False,
):  # fmt: skip
    """As load_rotated, with the rotation undone, and 0 in the columns beyond the last."""
    b_z, b_scale = load_rotated(p_codes, p_scales, seed, o_k, m_k, i_g, n_columns, BITS, MIXED)
    if n_columns - i_g * 64 >= 64:
        b_z = tl.dot(b_z, _hadamard(), input_precision=PRECISION) * _rotation_signs(seed)[None, :]
    else:
        b_z = tl.where((i_g * 64 + tl.arange(0, 64) < n_columns)[None, :], b_z, 0.0)
    return b_z, b_scale


@triton.jit
def _unpack_kernel(
    p_codes, p_scales, p_seed, p_z, n_rows, n_columns, BITS: tl.constexpr, B_K: tl.constexpr
):  # fmt: skip
    """One tile of B_K rows and one group, left rotated.

    p_codes, p_scales: see load_rotated. p_seed: int64 (1,). p_z: (K, I), contiguous.
    """
    i_g = tl.program_id(1).to(tl.int64)
    o_k = tl.program_id(0).to(tl.int64) * B_K + tl.arange(0, B_K)
    o_j = i_g * 64 + tl.arange(0, 64)
    m_k = o_k < n_rows
    b_z, _ = load_rotated(p_codes, p_scales, tl.load(p_seed), o_k, m_k, i_g, n_columns, BITS)
    p_tile = p_z + o_k[:, None] * n_columns + o_j[None, :]
    tl.store(p_tile, b_z.to(p_z.dtype.element_ty), mask=m_k[:, None] & (o_j < n_columns)[None, :])


@triton.jit
def _unrotate_kernel(
    p_m, p_seed, p_z, n_rows, n_columns, stride, PRECISION: tl.constexpr, B_K: tl.constexpr
):  # fmt: skip
    """One tile of B_K rows and one group.

    p_m: (O, I), rows ``stride`` apart. p_seed: int64 (1,). p_z: (O, I), contiguous.
    """
    i_g = tl.program_id(1).to(tl.int64)
    o_k = tl.program_id(0).to(tl.int64) * B_K + tl.arange(0, B_K)
    o_j = i_g * 64 + tl.arange(0, 64)
    m_z = (o_k < n_rows)[:, None] & (o_j < n_columns)[None, :]
    b_z = tl.load(p_m + o_k[:, None] * stride + o_j[None, :], mask=m_z, other=0.0).to(tl.float32)
    if n_columns - i_g * 64 >= 64:
        b_z = tl.dot(b_z, _hadamard(), input_precision=PRECISION) * _rotation_signs(tl.load(p_seed))[None, :]
    tl.store(p_z + o_k[:, None] * n_columns + o_j[None, :], b_z.to(p_z.dtype.element_ty), mask=m_z)


def empty_sketch(
    rows: int, columns: int, bits: int | None, like: torch.Tensor, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A sketch in a dtype, or in that of another tensor, and no scales; or codes and scales; not filled."""
    if bits is None:
        return torch.empty(rows, columns, dtype=dtype or like.dtype, device=like.device), None
    size = sum(-(-columns * width // 8) for width in ((2, 1) if bits == 3 else (bits,)))
    codes = torch.empty(rows, size, dtype=torch.uint8, device=like.device)
    return codes, torch.empty(rows, -(-columns // GROUP), dtype=torch.uint8, device=like.device)


def pack(matrix: torch.Tensor, bits: int, seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix to ``bits`` per element, at random and without bias.

    Args:
        matrix: float16, bfloat16 or float32, shape (K, I), any row stride.
        bits: 8, 4, 3 or 2.
        seed: int64, shape (1,), on the device of ``matrix``.

    Returns:
        Codes, uint8, shape (K, ⌈I·bits/8⌉), and scales, uint8, shape (K, ⌈I/64⌉).
    """
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    rows, columns = matrix.shape
    codes, scales = empty_sketch(rows, columns, bits, matrix)
    if matrix.numel():
        grid = (triton.cdiv(rows, 32), triton.cdiv(columns, GROUP))
        with on_device(matrix):
            _pack_kernel[grid](
                matrix, seed, codes, scales, rows, columns, matrix.stride(0),
                BITS=bits, PRECISION=precision(), B_K=32, num_warps=4,
            )  # fmt: skip
    return codes, scales


def unpack(
    codes: torch.Tensor, scales: torch.Tensor, seed: torch.Tensor, bits: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the matrix that packed storage stands for, its whole groups still rotated.

    Args:
        codes: uint8, shape (K, ⌈I·bits/8⌉).
        scales: uint8, shape (K, ⌈I/64⌉).
        seed: The seed it was packed with, int64, shape (1,).
        bits: 8, 4, 3 or 2.
        columns: I.
        dtype: dtype of the result.

    Returns:
        Shape (K, I).
    """
    rows = codes.shape[0]
    matrix = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    if matrix.numel():
        grid = (triton.cdiv(rows, 32), triton.cdiv(columns, GROUP))
        with on_device(codes):
            _unpack_kernel[grid](codes, scales, seed, matrix, rows, columns, BITS=bits, B_K=32, num_warps=4)
    return matrix


def unrotate(matrix: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Undo the rotation of a matrix's whole groups of 64 columns.

    Args:
        matrix: A result of ``unpack``, or a product of any matrix with it, shape (O, I), any row stride.
        seed: The seed it was packed with, int64, shape (1,).

    Returns:
        Shape (O, I), dtype of ``matrix``.
    """
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    rows, columns = matrix.shape
    result = torch.empty(rows, columns, dtype=matrix.dtype, device=matrix.device)
    if result.numel():
        grid = (triton.cdiv(rows, 32), triton.cdiv(columns, GROUP))
        with on_device(matrix):
            _unrotate_kernel[grid](
                matrix, seed, result, rows, columns, matrix.stride(0), PRECISION=precision(), B_K=32, num_warps=4
            )
    return result
