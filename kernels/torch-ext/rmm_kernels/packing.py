"""pack and unpack: 8, 4 or 2 bits per element in groups of 64 columns, and the epilogue that packs a sketch's tile."""

import torch
import triton
import triton.language as tl

from .draws import parity, words
from .launch import on_device, precision

GROUP = 64
_STREAM = tl.constexpr(3)


@triton.jit
def _round_down(b_values):
    """The largest bfloat16 number that is not above a float32 number, as float32."""
    bits = b_values.to(tl.int32, bitcast=True) & -65536
    truncated = bits.to(tl.float32, bitcast=True)
    below = (bits + 65536).to(tl.float32, bitcast=True)
    return tl.where(truncated > b_values, below, tl.where(b_values != b_values, b_values, truncated))


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
def _dither(seed, o_k, o_j):
    """u, the number that is added to an element before it is rounded down: float32 (B_K, 64), in [0, 1).

    seed: int64 scalar. o_k: int64 (B_K,), rows of the packed matrix. o_j: int64 (64,), its columns.
    """
    b_row, _, _, _ = words(seed, o_k, _STREAM)
    _, b_column, _, _ = words(seed, o_j, _STREAM)
    return ((b_row >> 9)[:, None] ^ (b_column >> 9)[None, :]).to(tl.float32) * 1.1920928955078125e-07


@triton.jit
def store_packed(b_z, seed, o_k, m_k, i_g, n_columns, p_codes, p_qparams, BITS: tl.constexpr, PRECISION: tl.constexpr):
    """Round one group of a tile and store its codes and range.

    b_z: float32 (B_K, 64). seed: int64 scalar. o_k: int64 (B_K,), rows of the packed matrix. m_k: rows that exist.
    i_g: number of the group. p_codes: uint8 (K, ⌈I·BITS/8⌉). p_qparams: bfloat16 (K, ⌈I/64⌉, 2).
    """
    SHARE: tl.constexpr = (1 + 2**-18) / (2**BITS - 1)
    BYTES: tl.constexpr = 8 * BITS
    o_j = tl.arange(0, 64)
    size = tl.minimum(n_columns - i_g * 64, 64).to(tl.int32)
    m_j = o_j < size
    if size == 64:
        b_z = tl.dot(b_z, _rotation_signs(seed)[:, None] * _hadamard(), input_precision=PRECISION)
    b_nan = tl.max(((b_z != b_z) & m_j[None, :]).to(tl.int32), axis=1) > 0
    b_low = tl.min(tl.where(m_j[None, :], b_z, float("inf")), axis=1)
    b_high = tl.max(tl.where(m_j[None, :], b_z, float("-inf")), axis=1)
    b_low = tl.where(b_nan, float("nan"), b_low)
    b_offset = _round_down(b_low)
    b_scale = -_round_down((b_offset - b_high) * SHARE)
    o_range = (o_k * tl.cdiv(n_columns, 64) + i_g) * 2
    tl.store(p_qparams + o_range, b_offset.to(tl.bfloat16), mask=m_k)
    tl.store(p_qparams + o_range + 1, b_scale.to(tl.bfloat16), mask=m_k)

    b_flat = b_scale < 1.1754943508222875e-38  # the reciprocal of a smaller number may be infinite
    b_inverse = tl.where(b_flat, 0.0, tl.math.div_rn(b_scale * 0 + 1, tl.where(b_flat, 1.0, b_scale)))
    b_steps = (b_z - b_offset[:, None]) * b_inverse[:, None]
    b_codes = tl.floor(b_steps + _dither(seed, o_k, i_g * 64 + o_j))
    # Beyond the last column a step may be too large for what follows, and infinity times 0 would reach the others.
    b_codes = tl.where(b_nan[:, None] | (m_j == 0)[None, :], 0.0, b_codes)
    # Byte i of the group holds the elements i, i + h, …, h bytes in all: a product with powers of two, which is exact.
    h = (size * BITS + 7) // 8
    o_b = tl.arange(0, BYTES)
    if BITS < 8:
        b_power = tl.exp2(tl.where(m_j, o_j // h * BITS, 0).to(tl.float32))
        b_join = tl.where(((o_j % h)[:, None] == o_b[None, :]) & m_j[:, None], b_power[:, None], 0.0)
        b_codes = tl.dot(b_codes.to(tl.float16), b_join.to(tl.float16))
    p_bytes = p_codes + o_k[:, None] * ((n_columns * BITS + 7) // 8) + i_g * BYTES + o_b[None, :]
    tl.store(p_bytes, b_codes.to(tl.int32).to(tl.uint8), mask=m_k[:, None] & (o_b < h)[None, :])


@triton.jit
def store_tile(
    b_z, seed, o_k, m_k, i_d, n_columns, p_z, p_qparams,
    BITS: tl.constexpr, PRECISION: tl.constexpr, B_D: tl.constexpr,
):  # fmt: skip
    """Store a tile of a sketch, packed if BITS is not 0.

    b_z: float32 (B_K, B_D). o_k: int64 (B_K,). m_k: rows that exist. i_d: int64, number of the tile among the columns.
    p_z: (K, n_columns), or codes. p_qparams: see store_packed.
    """
    if BITS == 0:
        o_d = i_d * B_D + tl.arange(0, B_D)
        p_out = p_z + o_k[:, None] * n_columns + o_d[None, :]
        tl.store(p_out, b_z.to(p_z.dtype.element_ty), mask=m_k[:, None] & (o_d < n_columns)[None, :])
    else:
        store_packed(b_z, seed, o_k, m_k, i_d, n_columns, p_z, p_qparams, BITS, PRECISION)


@triton.jit
def _pack_kernel(
    p_z, p_seed, p_codes, p_qparams, n_rows, n_columns, stride,
    BITS: tl.constexpr, PRECISION: tl.constexpr, B_K: tl.constexpr,
):  # fmt: skip
    """One tile of B_K rows and one group.

    p_z: (K, I), rows ``stride`` apart. p_seed: int64 (1,). p_codes, p_qparams: see store_packed.
    """
    i_g = tl.program_id(1).to(tl.int64)
    o_k = tl.program_id(0).to(tl.int64) * B_K + tl.arange(0, B_K)
    o_j = i_g * 64 + tl.arange(0, 64)
    m_k = o_k < n_rows
    m_z = m_k[:, None] & (o_j < n_columns)[None, :]
    b_z = tl.load(p_z + o_k[:, None] * stride + o_j[None, :], mask=m_z, other=0.0).to(tl.float32)
    store_packed(b_z, tl.load(p_seed), o_k, m_k, i_g, n_columns, p_codes, p_qparams, BITS, PRECISION)


@triton.jit
def load_rotated(p_codes, p_qparams, seed, o_k, m_k, i_g, n_columns, BITS: tl.constexpr):
    """One group of some rows, left rotated, float32 (B_K, 64), and its scales, float32 (B_K,); 0 for rows masked out.

    p_codes: uint8 (K, ⌈I·BITS/8⌉). p_qparams: bfloat16 (K, ⌈I/64⌉, 2). seed: int64 scalar. o_k: int64 (B_K,), rows of the
    packed matrix. m_k: rows that exist. i_g: int64, number of the group. The columns beyond the last are not zero.
    """
    o_j = tl.arange(0, 64)
    size = tl.minimum(n_columns - i_g * 64, 64).to(tl.int32)
    m_z = m_k[:, None] & (o_j < size)[None, :]
    h = (size * BITS + 7) // 8
    o_bytes = o_k[:, None] * ((n_columns * BITS + 7) // 8) + i_g * (8 * BITS) + (o_j % h)[None, :]
    b_bytes = tl.load(p_codes + o_bytes, mask=m_z, other=0).to(tl.int32)
    b_codes = (b_bytes >> (o_j // h * BITS)[None, :]) & (2**BITS - 1)
    o_range = (o_k * tl.cdiv(n_columns, 64) + i_g) * 2
    b_offset = tl.load(p_qparams + o_range, mask=m_k, other=0.0).to(tl.float32)
    b_scale = tl.load(p_qparams + o_range + 1, mask=m_k, other=0.0).to(tl.float32)
    b_u = _dither(seed, o_k, i_g * 64 + o_j)
    return (b_codes.to(tl.float32) - (b_u - 0.5)) * b_scale[:, None] + b_offset[:, None], b_scale


@triton.jit
def load_packed(
    p_codes, p_qparams, seed, o_k, m_k, i_g, n_columns, BITS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """As load_rotated, with the rotation undone, and 0 in the columns beyond the last."""
    b_z, b_scale = load_rotated(p_codes, p_qparams, seed, o_k, m_k, i_g, n_columns, BITS)
    if n_columns - i_g * 64 >= 64:
        b_z = tl.dot(b_z, _hadamard(), input_precision=PRECISION) * _rotation_signs(seed)[None, :]
    else:
        b_z = tl.where((i_g * 64 + tl.arange(0, 64) < n_columns)[None, :], b_z, 0.0)
    return b_z, b_scale


@triton.jit
def _unpack_kernel(
    p_codes, p_qparams, p_seed, p_z, n_rows, n_columns, BITS: tl.constexpr, B_K: tl.constexpr
):  # fmt: skip
    """One tile of B_K rows and one group, left rotated.

    p_codes, p_qparams: see load_rotated. p_seed: int64 (1,). p_z: (K, I), contiguous.
    """
    i_g = tl.program_id(1).to(tl.int64)
    o_k = tl.program_id(0).to(tl.int64) * B_K + tl.arange(0, B_K)
    o_j = i_g * 64 + tl.arange(0, 64)
    m_k = o_k < n_rows
    b_z, _ = load_rotated(p_codes, p_qparams, tl.load(p_seed), o_k, m_k, i_g, n_columns, BITS)
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
    """A sketch in a dtype, or in that of another tensor, and no qparams; or codes and qparams; not filled."""
    if bits is None:
        return torch.empty(rows, columns, dtype=dtype or like.dtype, device=like.device), None
    codes = torch.empty(rows, -(-columns * bits // 8), dtype=torch.uint8, device=like.device)
    return codes, torch.empty(rows, -(-columns // GROUP), 2, dtype=torch.bfloat16, device=like.device)


def pack(matrix: torch.Tensor, bits: int, seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix to ``bits`` per element, at random and without bias.

    Args:
        matrix: float16, bfloat16 or float32, shape (K, I), any row stride.
        bits: 8, 4 or 2.
        seed: int64, shape (1,), on the device of ``matrix``.

    Returns:
        Codes, uint8, shape (K, ⌈I·bits/8⌉), and qparams, bfloat16, shape (K, ⌈I/64⌉, 2).
    """
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    rows, columns = matrix.shape
    codes, qparams = empty_sketch(rows, columns, bits, matrix)
    if matrix.numel():
        grid = (triton.cdiv(rows, 32), triton.cdiv(columns, GROUP))
        with on_device(matrix):
            _pack_kernel[grid](
                matrix, seed, codes, qparams, rows, columns, matrix.stride(0),
                BITS=bits, PRECISION=precision(), B_K=32, num_warps=4,
            )  # fmt: skip
    return codes, qparams


def unpack(
    codes: torch.Tensor, qparams: torch.Tensor, seed: torch.Tensor, bits: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the matrix that packed storage stands for, its whole groups still rotated.

    Args:
        codes: uint8, shape (K, ⌈I·bits/8⌉).
        qparams: bfloat16, shape (K, ⌈I/64⌉, 2).
        seed: The seed it was packed with, int64, shape (1,).
        bits: 8, 4 or 2.
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
            _unpack_kernel[grid](codes, qparams, seed, matrix, rows, columns, BITS=bits, B_K=32, num_warps=4)
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
