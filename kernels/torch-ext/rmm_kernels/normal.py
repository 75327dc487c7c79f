"""encode_normal and decode_normal: two, three or four levels for normal numbers, in groups of 128 columns.

A group is rotated twice, by signs and the Hadamard matrix each time. Both rotations are one matrix, whose entries are
multiples of 1/64: every dtype holds them. The last group of a row is filled up with zeros.
"""

import torch
import triton
import triton.language as tl

from .draws import known_seed, words
from .groups import power_of, rotated, scale_line, scale_of, tile_words
from .launch import Seed, cdiv, given, is_asynchronous, is_ieee, launch, product_type
from .packing import tiles

GROUP = 128
GROUP_BYTES = {2: 32, 1.6: 26, 1: 16}
_STREAM = tl.constexpr(3)


@triton.jit
def _signed_hadamard(seed, FIRST: tl.constexpr, DTYPE: tl.constexpr):
    """±1: signs, the bits of four words from FIRST on, then 128 rows of the Hadamard matrix."""
    o_j = tl.arange(0, 128)
    _, _, b_word, _ = words(seed, (FIRST + o_j // 32).to(tl.int64), _STREAM)
    b_sign = ((b_word >> (o_j % 32).to(tl.uint32)) & 1).to(tl.int32)
    b_shared = o_j[:, None] & o_j[None, :]
    b_shared = b_shared ^ (b_shared >> 4)
    b_bit = (0x6996 >> (b_shared & 15)) ^ b_sign[:, None]
    return (0x3F800000 | (b_bit << 31)).to(tl.float32, bitcast=True).to(DTYPE)


@triton.jit
def _rotations(seed, DTYPE: tl.constexpr, BACK: tl.constexpr):
    """Both rotations of a group, (128, 128); BACK undoes them."""
    b_both = tl.dot(_signed_hadamard(seed, 0, DTYPE), _signed_hadamard(seed, 4, DTYPE)) * 0.0078125
    return (tl.trans(b_both) if BACK else b_both).to(DTYPE)


@triton.jit
def _rounded_scale(b_scale, b_chance):
    """The byte, int32, below or above a scale, with the probabilities that make it the mean; 255 beyond the last."""
    b_low = tl.minimum(tl.maximum(tl.floor(scale_line(b_scale)), 0.0), 253.0).to(tl.int32)
    b_below, b_above = tl.where(b_low == 0, 0.0, power_of(b_low)), power_of(b_low + 1)
    b_byte = b_low + (b_chance * (b_above - b_below) < b_scale - b_below).to(tl.int32)
    return tl.where(b_scale <= power_of(tl.full((), 254, tl.int32)), b_byte, 255)


@triton.jit(do_not_specialize=["seed", "n_fresh", "n_rows", "n_tiles"])
def _encode_normal_kernel(
    p_z, p_seed, seed: tl.int64, n_fresh, p_codes, p_scales, n_rows, n_tiles, n_columns, stride, row_bytes,
    LEVELS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, IEEE: tl.constexpr, WHOLE: tl.constexpr,
    B_K: tl.constexpr,
):  # fmt: skip
    """n_tiles tiles of B_K rows and one group.

    p_z: (K, I), rows ``stride`` apart. p_seed, seed, n_fresh: see known_seed. p_codes: uint8 (K, row_bytes), SIZE for
    each group. p_scales: uint8 (K, groups). HALF: the dtype of products. WHOLE: whether I is a multiple of 128.
    """
    n_groups = tl.cdiv(n_columns, 128)
    i_g = tl.program_id(0) % n_groups
    first = (tl.program_id(0) // n_groups).to(tl.int64) * (B_K * n_tiles)
    o_e, o_b = tl.arange(0, 128), tl.arange(0, 32)
    o_j = i_g * 128 + o_e
    seed = known_seed(p_seed, seed, n_fresh)
    b_rotations = _rotations(seed, HALF, False)
    # Byte i holds the elements i, i + SIZE, …, as digits of base LEVELS: a product with its powers, which is exact.
    LOG: tl.constexpr = 1.0 if LEVELS == 2 else (2.0 if LEVELS == 4 else 1.584962500721156)
    b_power = tl.exp2((o_e // SIZE).to(tl.float32) * LOG) + 0.5
    b_join = tl.where((o_e % SIZE)[:, None] == o_b[None, :], tl.floor(b_power)[:, None], 0.0).to(HALF)
    for i_t in range(n_tiles):
        begin = first + i_t * B_K
        o_k = begin + tl.arange(0, B_K)
        m_k = o_k < n_rows
        m_z = m_k[:, None] if WHOLE else m_k[:, None] & (o_j < n_columns)[None, :]
        b_z = tl.load(p_z + o_k[:, None] * stride + o_j[None, :], mask=m_z, other=0.0)
        b_z = rotated(b_z, b_rotations, IEEE)
        b_size, b_above = tl.abs(b_z), (b_z >= 0).to(tl.float32)
        b_squares = tl.sum(b_z * b_z, axis=1)
        if LEVELS == 2:
            b_level, b_digit = b_size * 0.7978846, b_above
        else:
            EDGE: tl.constexpr = 0.9815988 if LEVELS == 4 else 0.6120044
            b_outer = (b_size >= (tl.sqrt(b_squares * 0.0078125) * EDGE)[:, None]).to(tl.float32)
            LOW: tl.constexpr = 0.45278 if LEVELS == 4 else 0.0
            HIGH: tl.constexpr = 1.5104176 if LEVELS == 4 else 1.2240089
            b_level = b_size * (LOW + b_outer * (HIGH - LOW))
            b_digit = 1.0 - b_outer + b_above * (2.0 * b_outer + (LEVELS // 2 - 1))
        b_scale = b_squares / tl.maximum(tl.sum(b_level, axis=1), 1.1754943508222875e-38)
        b_row, b_group = tile_words(seed, begin, i_g // 64, B_K)
        b_group = tl.sum(tl.where(tl.arange(0, 64) == i_g % 64, b_group, 0), axis=0)
        b_chance = (b_row ^ b_group | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
        tl.store(p_scales + o_k * n_groups + i_g, _rounded_scale(b_scale, b_chance).to(tl.uint8), mask=m_k)
        b_bytes = tl.dot(b_digit.to(HALF), b_join).to(tl.int32).to(tl.uint8)
        m_b = m_k[:, None] & (o_b < SIZE)[None, :]
        tl.store(p_codes + o_k[:, None] * row_bytes + i_g * SIZE + o_b[None, :], b_bytes, mask=m_b)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _decode_normal_kernel(
    p_codes, p_scales, p_seed, p_z, n_rows, n_tiles, n_columns, row_bytes,
    LEVELS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, IEEE: tl.constexpr, WHOLE: tl.constexpr,
    B_K: tl.constexpr,
):  # fmt: skip
    """n_tiles tiles of B_K rows and one group; p_z: (K, I), contiguous. The others: see _encode_normal_kernel."""
    n_groups = tl.cdiv(n_columns, 128)
    i_g = tl.program_id(0) % n_groups
    first = (tl.program_id(0) // n_groups).to(tl.int64) * (B_K * n_tiles)
    o_e = tl.arange(0, 128)
    o_j = i_g * 128 + o_e
    b_rotations = _rotations(tl.load(p_seed), HALF, True)
    LOG: tl.constexpr = 1.0 if LEVELS == 2 else (2.0 if LEVELS == 4 else 1.584962500721156)
    b_over = tl.exp2((o_e // SIZE).to(tl.float32) * -LOG)  # 1 / the power of an element's digit
    for i_t in range(n_tiles):
        o_k = first + i_t * B_K + tl.arange(0, B_K)
        m_k = o_k < n_rows
        m_z = m_k[:, None] if WHOLE else m_k[:, None] & (o_j < n_columns)[None, :]
        p_bytes = p_codes + o_k[:, None] * row_bytes + i_g * SIZE + (o_e % SIZE)[None, :]
        b_bytes = tl.load(p_bytes, mask=m_k[:, None], other=0).to(tl.float32)
        b_left = tl.floor((b_bytes + 0.5) * b_over[None, :])
        b_digit = b_left - LEVELS * tl.floor((b_left + 0.5) * (1.0 / LEVELS))
        if LEVELS == 4:  # ± 1 and ± 3.33587, which float16 has to 2e-5
            b_value = b_digit * 2.0 - 3.0
            b_value = tl.where(tl.abs(b_value) > 2, b_value * (1.5104176 / 0.45278 / 3), b_value)
        else:
            STEP: tl.constexpr = 2.0 if LEVELS == 2 else 1.0
            b_value = b_digit * STEP - 1.0
        UNIT: tl.constexpr = 0.7978846 if LEVELS == 2 else (1.2240089 if LEVELS == 3 else 0.45278)
        b_byte = tl.load(p_scales + o_k * n_groups + i_g, mask=m_k, other=0).to(tl.int32)
        b_value = b_value if p_z.dtype.element_ty == tl.float32 else b_value.to(HALF)
        b_z = rotated(b_value, b_rotations, IEEE) * (scale_of(b_byte) * UNIT)[:, None]
        tl.store(p_z + o_k[:, None] * n_columns + o_j[None, :], b_z.to(p_z.dtype.element_ty), mask=m_z)


def encode_normal(matrix: torch.Tensor, bits: float, seed: Seed) -> tuple[torch.Tensor, torch.Tensor]:
    """Store a matrix in 2, 1.6 or 1 bits per element, without bias up to what two rotations leave.

    Args:
        matrix: float16, bfloat16 or float32, shape (K, I), any row stride.
        bits: 2, 1.6 or 1.
        seed: int64, shape (1,), on the device of ``matrix``; or to be written there, see ``given``.

    Returns:
        Codes, uint8, shape (K, ⌈I/128⌉ · (32, 26 or 16)), and scales, uint8, shape (K, ⌈I/128⌉).
    """
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    (rows, columns), group_bytes = matrix.shape, GROUP_BYTES[bits]
    groups = cdiv(columns, GROUP)
    codes, scales = (
        torch.empty(rows, n, dtype=torch.uint8, device=matrix.device) for n in (groups * group_bytes, groups)
    )
    seeds = given(seed, matrix.numel() > 0)
    if matrix.numel():
        size, warps = _shape(matrix, matrix.dtype)
        taken, grid = tiles(rows, groups, size)
        launch(
            _encode_normal_kernel, grid,
            matrix, *seeds, codes, scales, rows, taken, columns, matrix.stride(0), codes.shape[1],
            LEVELS=_levels(bits), SIZE=group_bytes, HALF=_half(matrix.dtype), IEEE=is_ieee(),
            WHOLE=columns % GROUP == 0, B_K=size, num_warps=warps,
        )  # fmt: skip
    return codes, scales


def decode_normal(
    codes: torch.Tensor, scales: torch.Tensor, seed: torch.Tensor, bits: float, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the matrix that ``encode_normal`` stored, shape (K, I).

    Args:
        codes: uint8, shape (K, ⌈I/128⌉ · (32, 26 or 16)), contiguous.
        scales: uint8, shape (K, ⌈I/128⌉), contiguous.
        seed: The seed it was stored with, int64, shape (1,).
        bits: 2, 1.6 or 1.
        columns: I.
        dtype: dtype of the result.
    """
    rows = codes.shape[0]
    matrix = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    if matrix.numel():
        size, warps = _shape(codes, dtype)
        taken, grid = tiles(rows, scales.shape[1], size)
        launch(
            _decode_normal_kernel, grid,
            codes, scales, seed, matrix, rows, taken, columns, codes.shape[1], LEVELS=_levels(bits),
            SIZE=GROUP_BYTES[bits], HALF=_half(dtype if dtype == torch.float32 else torch.float16),
            IEEE=is_ieee(), WHOLE=columns % GROUP == 0, B_K=size,
            num_warps=warps,
        )  # fmt: skip
    return matrix


def normal_shape(is_single: bool, is_asynchronous: bool) -> tuple[int, int]:
    """Rows of a tile and warps of a program that fit, beside a matrix of 128 by 128; see :func:`tile_rows`."""
    return (64, 4) if is_asynchronous else (16 if is_single else 64, 8)


def _shape(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
    return normal_shape(dtype == torch.float32, is_asynchronous(tensor))


def _half(dtype: torch.dtype) -> tl.dtype:
    """What groups are multiplied in; float32 as two parts in bfloat16: its own matrices leave no registers."""
    return product_type(torch.bfloat16 if dtype == torch.float32 else dtype)


def _levels(bits: float) -> int:
    return {2: 4, 1.6: 3, 1: 2}[bits]
