"""pack and unpack: 8, 4, 3 or 2 bits per element in groups of 64 columns; how many tiles a program takes."""

import torch
import triton
import triton.language as tl

from .draws import known_seed
from .groups import GROUP, PLANES, ROWS, load_packed, program_place, rotation, store_packed, tile_words
from .launch import Seed, cdiv, given, is_ieee, launch, product_type, rows_for, small_type

_PROGRAMS = 768  # the fewest that keep an H200 busy, as measured


@triton.jit(do_not_specialize=["seed", "n_fresh", "n_rows", "n_tiles", "n_tokens"])
def _pack_kernel(
    p_z, p_seed, seed: tl.int64, n_fresh, p_index, p_mean, p_codes, p_scales,
    n_rows, n_tiles, n_columns, n_tokens, stride, row_bytes,
    HAS_INDEX: tl.constexpr, HAS_MEAN: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, IEEE: tl.constexpr,
    TAIL: tl.constexpr, B_K: tl.constexpr,
):  # fmt: skip
    """n_tiles tiles of B_K rows and one group.

    p_z: (K, I), rows ``stride`` apart. p_seed, seed, n_fresh: see known_seed. p_index: int64 (n,), the rows; all
    without. p_mean: (K / n_tokens, I), what is taken off n_tokens rows each. HALF: the dtype of a half type in which
    tiles are multiplied, or float32. The others: see store_packed.
    """
    i_g, o_j, first = program_place(n_columns, n_tiles, B_K)
    seed = known_seed(p_seed, seed, n_fresh)
    b_rotation = rotation(seed, HALF)
    for i_t in range(n_tiles):
        begin = first + i_t * B_K
        o_k = begin + tl.arange(0, B_K)
        m_k = o_k < n_rows
        m_z = m_k[:, None] & (o_j < n_columns)[None, :] if TAIL else m_k[:, None]
        o_row = tl.load(p_index + o_k, mask=m_k, other=0) if HAS_INDEX else o_k
        b_z = tl.load(p_z + o_row[:, None] * stride + o_j[None, :], mask=m_z, other=0.0)
        if HAS_MEAN:
            o_mean = (o_row.to(tl.int32) // n_tokens).to(tl.int64)  # in 32 bits, a division takes few instructions
            b_mean = tl.load(p_mean + o_mean[:, None] * n_columns + o_j[None, :], mask=m_z, other=0.0)
            b_z = (b_z.to(tl.float32) - b_mean.to(tl.float32)).to(b_z.dtype)
        b_row, b_column = tile_words(seed, begin, i_g, B_K)
        store_packed(
            b_z, b_rotation, b_row, b_column, o_k, m_k, i_g, n_columns, row_bytes, p_codes, p_scales, BITS, IEEE, TAIL
        )


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _unpack_kernel(
    p_codes, p_scales, p_seed, p_z, n_rows, n_tiles, n_columns, row_bytes,
    BITS: tl.constexpr, HALF: tl.constexpr, IEEE: tl.constexpr, TAIL: tl.constexpr, B_K: tl.constexpr,
):  # fmt: skip
    """n_tiles tiles of B_K rows and one group.

    p_codes, p_scales: see load_packed. p_seed: int64 (1,). p_z: (K, I), contiguous. HALF: see load_packed.
    """
    i_g, o_j, first = program_place(n_columns, n_tiles, B_K)
    b_rotation = rotation(tl.load(p_seed), HALF, True)
    for i_t in range(n_tiles):
        begin = first + i_t * B_K
        o_k = begin + tl.arange(0, B_K)
        m_k = o_k < n_rows
        m_z = m_k[:, None] & (o_j < n_columns)[None, :] if TAIL else m_k[:, None]
        b_row, b_column = tile_words(tl.load(p_seed), begin, i_g, B_K)
        b_z, _ = load_packed(
            p_codes, p_scales, b_rotation, b_row, b_column, o_k, m_k, i_g, n_columns, row_bytes, BITS, IEEE, TAIL
        )
        tl.store(p_z + o_k[:, None] * n_columns + o_j[None, :], b_z.to(p_z.dtype.element_ty), mask=m_z)


def code_bytes(columns: int, bits: int) -> int:
    """Bytes of the codes of a row."""
    return sum(-(-columns * width // 8) for width in PLANES[bits])


def empty_sketch(
    rows: int, columns: int, bits: int | None, like: torch.Tensor, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A sketch in a dtype, or in that of another tensor, and no scales; or codes and scales; not filled."""
    if bits is None:
        return torch.empty(rows, columns, dtype=dtype or like.dtype, device=like.device), None
    codes = torch.empty(rows, code_bytes(columns, bits), dtype=torch.uint8, device=like.device)
    return codes, torch.empty(rows, cdiv(columns, GROUP), dtype=torch.uint8, device=like.device)


def tiles(rows: int, groups: int, size: int = ROWS) -> tuple[int, tuple[int]]:
    """Tiles of rows that a program takes, and the grid: several where enough programs are left for a device."""
    count = cdiv(rows, size)
    taken = max(1, min(8, count * groups // _PROGRAMS))
    return taken, (cdiv(count, taken) * groups,)


def pack(
    matrix: torch.Tensor,
    bits: int,
    seed: Seed,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    index: torch.Tensor | None = None,
    mean: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix to ``bits`` per element, at random and without bias.

    Args:
        matrix: float16, bfloat16 or float32, shape (K, I), any row stride.
        bits: 8, 4, 3 or 2.
        seed: int64, shape (1,), on the device of ``matrix``; or to be written there, see ``given``.
        out: The result is written into them, contiguous; None makes them.
        index: Rows to pack, int64, shape (n,); None for all K.
        mean: What is taken off rows before, dtype of ``matrix``, shape (m, I): off K/m rows each; None for nothing.

    Returns:
        Codes, uint8, shape (n, ⌈I·bits/8⌉), and scales, uint8, shape (n, ⌈I/64⌉).
    """
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    rows, columns = matrix.shape[0] if index is None else index.shape[0], matrix.shape[1]
    codes, scales = empty_sketch(rows, columns, bits, matrix) if out is None else out
    seeds = given(seed, rows > 0 and columns > 0)
    if rows and columns:
        size = rows_for(matrix, matrix.dtype, columns % GROUP != 0)
        taken, grid = tiles(rows, scales.shape[1], size)
        launch(
            _pack_kernel, grid,
            matrix, *seeds, index, None if mean is None else mean.contiguous(), codes, scales, rows, taken, columns,
            1 if mean is None else matrix.shape[0] // mean.shape[0], matrix.stride(0), codes.shape[1],
            HAS_INDEX=index is not None, HAS_MEAN=mean is not None, BITS=bits, HALF=product_type(matrix.dtype),
            IEEE=is_ieee(), TAIL=columns % GROUP != 0, B_K=size,
        )  # fmt: skip
    return codes, scales


def unpack(
    codes: torch.Tensor,
    scales: torch.Tensor,
    seed: torch.Tensor,
    bits: int,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the matrix that packed storage stands for.

    Args:
        codes: uint8, shape (K, ⌈I·bits/8⌉), contiguous.
        scales: uint8, shape (K, ⌈I/64⌉), contiguous.
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
        size = rows_for(codes, dtype, columns % GROUP != 0)
        taken, grid = tiles(rows, scales.shape[1], size)
        launch(
            _unpack_kernel, grid,
            codes, scales, seed, matrix, rows, taken, columns, codes.shape[1], BITS=bits,
            HALF=small_type(dtype), IEEE=is_ieee(), TAIL=columns % GROUP != 0, B_K=size,
        )  # fmt: skip
    return matrix
