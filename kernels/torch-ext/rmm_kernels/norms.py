"""pack_norm, normalize_and_pack and norm_gradients: norms with a packed copy of the normalized rows."""

import torch
import triton
import triton.language as tl

from .draws import known_seed, seed_again
from .groups import GROUP, load_packed, program_place, rotation, row_words, store_packed, tile_words
from .launch import Seed, cdiv, given, is_ieee, launch, places, rows_for, small_type
from .packing import empty_sketch, tiles

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_COLUMNS = 64  # of a program that sums columns


@triton.jit
def _statistics(p_rows, m_k, n_columns, CENTERED: tl.constexpr, B_K: tl.constexpr, B_D: tl.constexpr):
    """Means of rows, 0 if not CENTERED, and sums of squares about them, float32 (B_K,), merged over blocks of columns.

    p_rows: pointers (B_K, 1). m_k: rows that exist.
    """
    b_mean = tl.zeros((B_K,), dtype=tl.float32)
    b_squares = tl.zeros((B_K,), dtype=tl.float32)
    for i_d in range(0, n_columns, B_D):
        o_d = i_d + tl.arange(0, B_D)
        m_x = m_k[:, None] & (o_d < n_columns)[None, :]
        b_x = tl.load(p_rows + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
        if CENTERED:
            size = tl.minimum(n_columns - i_d, B_D).to(tl.float32)
            share = size / (i_d + size)
            b_block = tl.sum(b_x, axis=1) / size
            b_x = tl.where(m_x, b_x - b_block[:, None], 0.0)
            b_apart = b_block - b_mean
            b_squares += b_apart * b_apart * (i_d * share)
            b_mean += b_apart * share
        b_squares += tl.sum(b_x * b_x, axis=1)
    return b_mean, b_squares


@triton.jit(do_not_specialize=["n_rows"])
def _row_statistics_kernel(
    p_x, p_index, p_place, p_mean, p_rstd, p_saved, n_rows, n_columns, stride, eps,
    CENTERED: tl.constexpr, HAS_INDEX: tl.constexpr, HAS_PLACE: tl.constexpr, B_K: tl.constexpr, B_D: tl.constexpr,
):  # fmt: skip
    """B_K rows.

    p_x: (N, H), rows ``stride`` apart. p_index: int64 (n,), the rows; all without. p_mean, p_rstd: float32, of every
    row. p_place: int64 (N,), and p_saved: float32, where rstd is written as well, unless the place is −1.
    """
    o_k = tl.program_id(0).to(tl.int64) * B_K + tl.arange(0, B_K)
    m_k = o_k < n_rows
    o_row = tl.load(p_index + o_k, mask=m_k, other=0) if HAS_INDEX else o_k
    b_mean, b_squares = _statistics(p_x + o_row[:, None] * stride, m_k, n_columns, CENTERED, B_K, B_D)
    b_rstd = 1.0 / tl.sqrt(b_squares / n_columns + eps)
    if CENTERED:
        tl.store(p_mean + o_k, b_mean, mask=m_k)
    tl.store(p_rstd + o_k, b_rstd, mask=m_k)
    if HAS_PLACE:
        o_place = tl.load(p_place + o_k, mask=m_k, other=-1)
        tl.store(p_saved + o_place, b_rstd, mask=m_k & (o_place >= 0))


@triton.jit
def _normalized(p_x, p_mean, p_rstd, o_row, o_k, m_k, m_x, o_j, stride, CENTERED: tl.constexpr):
    """The normalized rows h, one group of them, float32 (B_K, 64)."""
    b_x = tl.load(p_x + o_row[:, None] * stride + o_j[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_rstd = tl.load(p_rstd + o_k, mask=m_k, other=0.0)
    if CENTERED:
        b_x = tl.where(m_x, b_x - tl.load(p_mean + o_k, mask=m_k, other=0.0)[:, None], 0.0)
    return b_x * b_rstd[:, None]


@triton.jit(do_not_specialize=["seed", "n_fresh", "n_rows", "n_tiles"])
def _pack_norm_kernel(
    p_x, p_index, p_seed, seed: tl.int64, n_fresh, p_mean, p_rstd, p_codes, p_scales,
    n_rows, n_tiles, n_columns, stride, row_bytes,
    CENTERED: tl.constexpr, HAS_INDEX: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, IEEE: tl.constexpr,
    TAIL: tl.constexpr, B_K: tl.constexpr,
):  # fmt: skip
    """n_tiles tiles of B_K rows and one group.

    p_x: (N, H), rows ``stride`` apart. p_index: int64 (n,). p_seed, seed, n_fresh: see known_seed. p_mean, p_rstd:
    float32 (n,). HALF: the dtype in which h, which is below √H, is multiplied. The others: see store_packed.
    """
    i_g, o_j, first = program_place(n_columns, n_tiles, B_K)
    b_rotation = rotation(known_seed(p_seed, seed, n_fresh), HALF)
    for i_t in range(n_tiles):
        begin = first + i_t * B_K
        o_k = begin + tl.arange(0, B_K)
        m_k = o_k < n_rows
        m_x = m_k[:, None] & (o_j < n_columns)[None, :] if TAIL else m_k[:, None]
        o_row = tl.load(p_index + o_k, mask=m_k, other=0) if HAS_INDEX else o_k
        b_h = _normalized(p_x, p_mean, p_rstd, o_row, o_k, m_k, m_x, o_j, stride, CENTERED)
        b_row, b_column = tile_words(seed_again(p_seed, seed, n_fresh), begin, i_g, B_K)
        store_packed(
            b_h.to(HALF), b_rotation, b_row, b_column, o_k, m_k, i_g, n_columns, row_bytes, p_codes, p_scales,
            BITS, IEEE, TAIL, True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["seed", "n_fresh", "n_rows", "n_tiles"])
def _normalize_kernel(
    p_x, p_place, p_seed, seed: tl.int64, n_fresh, p_mean, p_rstd, p_gamma, p_beta, p_out, p_codes, p_scales,
    n_rows, n_tiles, n_columns, stride, row_bytes,
    CENTERED: tl.constexpr, HAS_PLACE: tl.constexpr, HAS_GAMMA: tl.constexpr, HAS_BETA: tl.constexpr,
    ROUND: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, IEEE: tl.constexpr, TAIL: tl.constexpr,
    B_K: tl.constexpr,
):  # fmt: skip
    """n_tiles tiles of B_K rows and one group, written and packed.

    p_place: int64 (N,), the row of the packed copy, or −1. p_mean, p_rstd: float32 (N,). p_gamma, p_beta: (H,).
    p_out: (N, H), contiguous. ROUND: the dtype that h is rounded to before γ, or None. The others:
    see _pack_norm_kernel.
    """
    i_g, o_j, first = program_place(n_columns, n_tiles, B_K)
    m_j = o_j < n_columns
    seed = known_seed(p_seed, seed, n_fresh)
    b_rotation = rotation(seed, HALF)
    for i_t in range(n_tiles):
        begin = first + i_t * B_K
        o_n = begin + tl.arange(0, B_K)
        m_n = o_n < n_rows
        m_x = m_n[:, None] & m_j[None, :] if TAIL else m_n[:, None]
        b_h = _normalized(p_x, p_mean, p_rstd, o_n, o_n, m_n, m_x, o_j, stride, CENTERED)
        b_out = b_h if ROUND is None else b_h.to(ROUND).to(tl.float32)
        if HAS_GAMMA:
            b_out *= tl.load(p_gamma + o_j, mask=m_j, other=0.0).to(tl.float32)[None, :]
        if HAS_BETA:
            b_out += tl.load(p_beta + o_j, mask=m_j, other=0.0).to(tl.float32)[None, :]
        tl.store(p_out + o_n[:, None] * n_columns + o_j[None, :], b_out.to(p_out.dtype.element_ty), mask=m_x)
        o_k = tl.load(p_place + o_n, mask=m_n, other=-1) if HAS_PLACE else o_n
        m_k = (o_k >= 0) & m_n
        o_k = tl.maximum(o_k, 0)
        b_row, b_column = tile_words(seed, begin, i_g, B_K)
        if HAS_PLACE:
            b_row = row_words(seed, o_k)
        store_packed(
            b_h.to(HALF), b_rotation, b_row, b_column, o_k, m_k, i_g, n_columns, row_bytes, p_codes, p_scales,
            BITS, IEEE, TAIL, True,
        )  # fmt: skip


@triton.jit
def _load_gradient(
    p_y, p_gamma, o_row, m_y, o_j, n_columns, stride, HAS_GAMMA: tl.constexpr
):  # fmt: skip
    """Y and γ ∘ y of one group, float32 (B_K, 64)."""
    b_y = tl.load(p_y + o_row[:, None] * stride + o_j[None, :], mask=m_y, other=0.0).to(tl.float32)
    if HAS_GAMMA:
        return b_y, b_y * tl.load(p_gamma + o_j, mask=o_j < n_columns, other=0.0).to(tl.float32)[None, :]
    else:
        return b_y, b_y


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _norm_sums_kernel(
    p_y, p_index, p_seed, p_gamma, p_codes, p_scales, p_rows, p_sums, n_rows, n_tiles, n_columns, stride, row_bytes,
    SUMS: tl.constexpr, CENTERED: tl.constexpr, HAS_INDEX: tl.constexpr, HAS_GAMMA: tl.constexpr, BITS: tl.constexpr,
    HALF: tl.constexpr, IEEE: tl.constexpr, TAIL: tl.constexpr, B_K: tl.constexpr,
):  # fmt: skip
    """n_tiles tiles of B_K rows and one group: the sums of γ ∘ y ∘ h and γ ∘ y over its columns, and over rows.

    p_y: (N, H), rows ``stride`` apart. p_index: int64 (n,). p_seed: int64 (1,). p_gamma: (H,). p_rows: float32
    (groups, 2, n), or (groups, 1, n) without the sum of γ ∘ y if not CENTERED. p_sums: float32 (programs of a group, 2,
    H), of y ∘ h and y. The others: see load_packed.
    """
    n_groups = tl.cdiv(n_columns, 64)
    i_g = tl.program_id(0) % n_groups
    i_p = (tl.program_id(0) // n_groups).to(tl.int64)
    o_j = i_g * 64 + tl.arange(0, 64)
    b_rotation = rotation(tl.load(p_seed), HALF, True)
    b_weight = tl.zeros((64,), dtype=tl.float32)
    b_bias = tl.zeros((64,), dtype=tl.float32)
    for i_t in range(n_tiles):
        begin = (i_p * n_tiles + i_t) * B_K
        o_k = begin + tl.arange(0, B_K)
        m_k = o_k < n_rows
        m_y = m_k[:, None] & (o_j < n_columns)[None, :] if TAIL else m_k[:, None]
        o_row = tl.load(p_index + o_k, mask=m_k, other=0) if HAS_INDEX else o_k
        b_row, b_column = tile_words(tl.load(p_seed), begin, i_g, B_K)
        b_h, _ = load_packed(
            p_codes, p_scales, b_rotation, b_row, b_column, o_k, m_k, i_g, n_columns, row_bytes, BITS, IEEE, TAIL, True
        )
        b_y, b_g = _load_gradient(p_y, p_gamma, o_row, m_y, o_j, n_columns, stride, HAS_GAMMA)
        p_row = p_rows + i_g.to(tl.int64) * (1 + CENTERED) * n_rows + o_k
        tl.store(p_row, tl.sum(b_g * b_h, axis=1), mask=m_k)
        if CENTERED:
            tl.store(p_row + n_rows, tl.sum(b_g, axis=1), mask=m_k)
        if SUMS:
            b_weight += tl.sum(b_y * b_h, axis=0)
            b_bias += tl.sum(b_y, axis=0)
    if SUMS:
        p_sum = p_sums + i_p * 2 * n_columns + o_j
        tl.store(p_sum, b_weight, mask=o_j < n_columns)
        tl.store(p_sum + n_columns, b_bias, mask=o_j < n_columns)


@triton.jit
def _column_sums(p_m, n_rows, n_columns, o_c, B_R: tl.constexpr, B_C: tl.constexpr):
    """Sums of the columns o_c of a matrix, float32 (n_rows, n_columns), contiguous; 0 beyond the last."""
    b_sum = tl.zeros((B_R, B_C), dtype=tl.float32)
    for i_r in range(0, n_rows, B_R):
        o_r = i_r + tl.arange(0, B_R)
        m_m = (o_r < n_rows)[:, None] & (o_c < n_columns)[None, :]
        b_sum += tl.load(p_m + o_r[:, None].to(tl.int64) * n_columns + o_c[None, :], mask=m_m, other=0.0)
    return tl.sum(b_sum, axis=0)


@triton.jit(do_not_specialize=["n_groups", "n_rows", "n_programs"])
def _norm_totals_kernel(
    p_rows, p_sums, p_total, p_weight, p_bias, n_groups, n_rows, n_programs, n_columns,
    SUMS: tl.constexpr, B_R: tl.constexpr, B_C: tl.constexpr,
):  # fmt: skip
    """B_C sums over groups, and behind them as many over the programs of a group: dγ and dβ.

    p_rows: float32 (n_groups, n_rows), n_rows sums for every group. p_total: float32 (n_rows,). p_sums: float32
    (n_programs, 2, n_columns). p_weight, p_bias: (n_columns,).
    """
    n_blocks = tl.cdiv(n_rows, B_C)
    i_b = tl.program_id(0)
    if i_b < n_blocks:
        o_k = i_b * B_C + tl.arange(0, B_C)
        tl.store(p_total + o_k, _column_sums(p_rows, n_groups, n_rows, o_k, B_R, B_C), mask=o_k < n_rows)
    else:
        if SUMS:
            o_j = (i_b - n_blocks) * B_C + tl.arange(0, B_C)
            b_sum = _column_sums(p_sums, n_programs, 2 * n_columns, o_j, B_R, B_C)
            tl.store(p_weight + o_j, b_sum.to(p_weight.dtype.element_ty), mask=o_j < n_columns)
            o_j -= n_columns
            tl.store(p_bias + o_j, b_sum.to(p_bias.dtype.element_ty), mask=(o_j >= 0) & (o_j < n_columns))


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _norm_backward_kernel(
    p_y, p_index, p_seed, p_gamma, p_codes, p_scales, p_rstd, p_rows, p_out,
    n_rows, n_tiles, n_columns, stride, row_bytes,
    CENTERED: tl.constexpr, HAS_INDEX: tl.constexpr, HAS_GAMMA: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr,
    IEEE: tl.constexpr, TAIL: tl.constexpr, B_K: tl.constexpr,
):  # fmt: skip
    """n_tiles tiles of B_K rows and one group: their gradient.

    p_rstd: float32 (n,). p_rows: float32 (2, n), sums over all groups. p_out: (N, H), contiguous. The others: see
    _norm_sums_kernel.
    """
    i_g, o_j, first = program_place(n_columns, n_tiles, B_K)
    b_rotation = rotation(tl.load(p_seed), HALF, True)
    share = 1.0 / n_columns
    for i_t in range(n_tiles):
        begin = first + i_t * B_K
        o_k = begin + tl.arange(0, B_K)
        m_k = o_k < n_rows
        m_y = m_k[:, None] & (o_j < n_columns)[None, :] if TAIL else m_k[:, None]
        o_row = tl.load(p_index + o_k, mask=m_k, other=0) if HAS_INDEX else o_k
        b_row, b_column = tile_words(tl.load(p_seed), begin, i_g, B_K)
        b_h, b_scale = load_packed(
            p_codes, p_scales, b_rotation, b_row, b_column, o_k, m_k, i_g, n_columns, row_bytes, BITS, IEEE, TAIL, True
        )
        _, b_g = _load_gradient(p_y, p_gamma, o_row, m_y, o_j, n_columns, stride, HAS_GAMMA)
        b_rstd = tl.load(p_rstd + o_k, mask=m_k, other=0.0)
        b_slope = tl.load(p_rows + o_k, mask=m_k, other=0.0) * share * b_rstd
        b_kept = (1.0 + b_scale * b_scale * (share / 12.0)) * b_rstd
        b_out = b_g * b_kept[:, None] - b_h * b_slope[:, None]
        if CENTERED:
            b_out -= (tl.load(p_rows + n_rows + o_k, mask=m_k, other=0.0) * share * b_rstd)[:, None]
        tl.store(p_out + o_row[:, None] * n_columns + o_j[None, :], b_out.to(p_out.dtype.element_ty), mask=m_y)


def _row_statistics(
    x: torch.Tensor,
    rstd: torch.Tensor,
    eps: float,
    centered: bool,
    index: torch.Tensor | None = None,
    place: torch.Tensor | None = None,
    saved: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Write 1/σ of rows, and of those that have a place to ``saved``; return their means, or None if not centered."""
    rows = rstd.shape[0]
    mean = torch.empty(rows, dtype=torch.float32, device=x.device) if centered else None
    launch(
        _row_statistics_kernel, (cdiv(rows, 8),),
        x, index, place, mean, rstd, saved, rows, x.shape[1], x.stride(0), eps,
        CENTERED=centered, HAS_INDEX=index is not None, HAS_PLACE=place is not None, B_K=8, B_D=256,
    )  # fmt: skip
    return mean


def _empty(rows: int, columns: int, bits: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, scales = empty_sketch(rows, columns, bits, like)
    return codes, scales, torch.empty(rows, dtype=torch.float32, device=like.device)


def pack_norm(
    x: torch.Tensor,
    bits: int,
    seed: Seed,
    eps: float,
    centered: bool = True,
    index: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalize rows and round them to ``bits`` per element.

    Args:
        x: float16, bfloat16 or float32, shape (N, H), any row stride.
        bits: 8, 4 or 2.
        seed: int64, shape (1,), on the device of ``x``; or to be written there, see ``given``.
        eps: What is added to the variance.
        centered: True for LayerNorm, False for RMSNorm.
        index: Rows to save, int64, shape (n,); None for all.
        out: The result is written into them, contiguous; None makes them.

    Returns:
        Codes, uint8, shape (n, ⌈H·bits/8⌉), scales, uint8, shape (n, ⌈H/64⌉), and rstd, float32, shape (n,).
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape[0] if index is None else index.shape[0], x.shape[1]
    codes, scales, rstd = _empty(rows, columns, bits, x) if out is None else out
    seeds = given(seed, codes.numel() > 0)
    if codes.numel():
        size = rows_for(x, x.dtype, columns % GROUP != 0)
        taken, grid = tiles(rows, scales.shape[1], size)
        mean = _row_statistics(x, rstd, eps, centered, index)
        launch(
            _pack_norm_kernel, grid,
            x, index, *seeds, mean, rstd, codes, scales, rows, taken, columns, x.stride(0), codes.shape[1],
            CENTERED=centered, HAS_INDEX=index is not None, BITS=bits, HALF=small_type(x.dtype),
            IEEE=is_ieee(), TAIL=columns % GROUP != 0, B_K=size,
        )  # fmt: skip
    return codes, scales, rstd


def normalize_and_pack(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    bits: int,
    seed: Seed,
    eps: float,
    centered: bool = True,
    index: torch.Tensor | None = None,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute γ ∘ h + β of the normalized rows h, and what ``pack_norm`` makes of them, in one pass.

    Args:
        x: float16, bfloat16 or float32, shape (N, H), any row stride.
        gamma: γ, shape (H,); None is 1.
        beta: β, shape (H,); None is 0.
        dtypes: What h is rounded to before γ, float32 for not at all, and the dtype of the result.
        bits: As for ``pack_norm``, as the following ones.
        seed: int64, shape (1,), on the device of ``x``; or to be written there, see ``given``.
        eps: What is added to the variance.
        centered: True for LayerNorm, False for RMSNorm.
        index: Rows to save, int64, shape (n,); None for all.
        saved: Codes, scales and rstd are written into them, contiguous; None makes them.

    Returns:
        The result of all rows, shape (N, H), contiguous; codes, scales and rstd.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, columns), kept = x.shape, x.shape[0] if index is None else index.shape[0]
    gamma, beta = (None if one is None else one.contiguous() for one in (gamma, beta))
    codes, scales, rstd = _empty(kept, columns, bits, x) if saved is None else saved
    out = torch.empty(x.shape, dtype=dtypes[1], device=x.device)
    seeds = given(seed, out.numel() > 0)
    if out.numel():
        place = places(index, rows)
        of_all = rstd if index is None else torch.empty(rows, dtype=torch.float32, device=x.device)
        size = rows_for(x, x.dtype, columns % GROUP != 0)
        taken, grid = tiles(rows, scales.shape[1], size)
        mean = _row_statistics(x, of_all, eps, centered, None, place, None if index is None else rstd)
        launch(
            _normalize_kernel, grid,
            x, place, *seeds, mean, of_all, gamma, beta, out, codes, scales, rows, taken, columns, x.stride(0),
            codes.shape[1], CENTERED=centered, HAS_PLACE=index is not None, HAS_GAMMA=gamma is not None,
            HAS_BETA=beta is not None, ROUND=_TYPES.get(dtypes[0]), BITS=bits, HALF=small_type(x.dtype), IEEE=is_ieee(),
            TAIL=columns % GROUP != 0, B_K=size,
        )  # fmt: skip
    return out, codes, scales, rstd


def norm_gradients(
    y: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    rstd: torch.Tensor,
    bits: int,
    seed: torch.Tensor,
    gamma: torch.Tensor | None = None,
    *,
    centered: bool = True,
    index: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    sums: bool = True,
    sum_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of a norm from what ``pack_norm`` has made, the known variance of the copy taken out.

    Args:
        y: Gradient with respect to the output, float16, bfloat16 or float32, shape (N, H), any row stride.
        codes: uint8, shape (n, ⌈H·bits/8⌉), contiguous.
        scales: uint8, shape (n, ⌈H/64⌉), contiguous.
        rstd: float32, shape (n,), contiguous.
        bits: 8, 4 or 2.
        seed: The seed it was packed with.
        gamma: γ, shape (H,); None is 1.
        centered: True for LayerNorm, False for RMSNorm.
        index: Rows that are saved, int64, shape (n,); None for all.
        dtype: dtype of dX; None is that of ``y``.
        sums: Whether dγ and dβ are needed.
        sum_dtype: dtype of dγ and dβ, which are summed in float32; None is that.

    Returns:
        dX, shape (N, H), zero in rows that are not in ``index``; dγ and dβ, shape (H,), or (0,).
    """
    y = y if y.stride(1) == 1 else y.contiguous()
    rows, columns = rstd.shape[0], y.shape[1]
    gamma = None if gamma is None else gamma.contiguous()
    x = (torch.empty if index is None else torch.zeros)(y.shape, dtype=dtype or y.dtype, device=y.device)
    make = torch.empty if rows else torch.zeros
    weight, bias = (make(columns if sums else 0, dtype=sum_dtype or torch.float32, device=y.device) for _ in range(2))
    if rows and columns:
        groups, of_row = scales.shape[1], 1 + centered
        size = rows_for(y, y.dtype, columns % GROUP != 0)
        taken, grid = tiles(rows, groups, size)
        programs = grid[0] // groups
        of_rows = torch.empty(groups, of_row, rows, dtype=torch.float32, device=y.device)
        total = torch.empty(of_row, rows, dtype=torch.float32, device=y.device)
        partial = torch.empty(programs, 2, columns, dtype=torch.float32, device=y.device) if sums else None
        how = {
            "CENTERED": centered, "HAS_INDEX": index is not None, "HAS_GAMMA": gamma is not None, "BITS": bits,
            "HALF": small_type(y.dtype), "IEEE": is_ieee(), "TAIL": columns % GROUP != 0, "B_K": size,
        }  # fmt: skip
        shape = rows, taken, columns, y.stride(0), codes.shape[1]
        launch(
            _norm_sums_kernel, grid, y, index, seed, gamma, codes, scales, of_rows, partial, *shape, SUMS=sums, **how
        )  # fmt: skip
        launch(
            _norm_totals_kernel, (cdiv(of_row * rows, _COLUMNS) + (cdiv(2 * columns, _COLUMNS) if sums else 0),),
            of_rows, partial, total, weight if sums else None, bias if sums else None,
            groups, of_row * rows, programs, columns, SUMS=sums, B_R=32, B_C=_COLUMNS,
        )  # fmt: skip
        launch(
            _norm_backward_kernel, grid,
            y, index, seed, gamma, codes, scales, rstd, total, x, *shape, **how
        )  # fmt: skip
    return x, weight, bias
