"""pack_channels and channel_gradients: BatchNorm, GroupNorm and InstanceNorm with a packed copy of what they normalize.

An input (N, S, C, B), of which S or B is 1, has C channels of N samples. Those that are normalized together are a set:
a channel of all samples, or ``inner`` channels of one. It is packed as a matrix, whose columns are channels, or runs of
``length`` elements of one channel each: FIRST. A tile has rows of one sample where sets do and columns are channels.
"""

import math

import torch
import triton
import triton.language as tl

from .draws import known_seed, seed_again
from .groups import GROUP, load_packed, rotation, store_packed, tile_words
from .launch import Seed, cdiv, given, is_ieee, launch, rows_for, small_type
from .packing import empty_sketch, tiles

_TILE = 2048  # elements of a tile of statistics
_SPAN = 16  # tiles of a program


@triton.jit(do_not_specialize=["n_tiles"])
def _channel_statistics_kernel(
    p_x, p_means, n_channels, n_length, n_tiles, stride, stride_b, B_C: tl.constexpr, B_L: tl.constexpr
):
    """Mean, and squares about it, of a span of n_tiles · B_L elements of B_C channels of a sample.

    p_x: (N, C, L), contiguous but for the order of the last two, whose elements lie ``stride`` and ``stride_b`` apart.
    p_means: float32 (N, spans, 2, C).
    """
    n_span = n_tiles * B_L
    n_blocks, n_spans = tl.cdiv(n_channels, B_C), tl.cdiv(n_length, n_span)
    i_s = tl.program_id(0) // n_blocks
    o_c = (tl.program_id(0) % n_blocks) * B_C + tl.arange(0, B_C)
    m_c = o_c < n_channels
    begin = (i_s % n_spans) * n_tiles * B_L
    count = tl.minimum(n_length - begin, n_span)
    p_rows = p_x + (i_s // n_spans).to(tl.int64) * n_channels * n_length + o_c[:, None].to(tl.int64) * stride
    b_mean = tl.zeros((B_C,), dtype=tl.float32)
    b_squares = tl.zeros((B_C,), dtype=tl.float32)
    for i_l in range(0, count, B_L):
        o_l = begin + i_l + tl.arange(0, B_L)
        m_x = m_c[:, None] & (o_l < n_length)[None, :]
        b_x = tl.load(p_rows + o_l.to(tl.int64)[None, :] * stride_b, mask=m_x, other=0.0).to(tl.float32)
        size = tl.minimum(count - i_l, B_L).to(tl.float32)
        share = size / (i_l + size)
        b_block = tl.sum(b_x, axis=1) / size
        b_x = tl.where(m_x, b_x - b_block[:, None], 0.0)
        b_apart = b_block - b_mean
        b_squares += tl.sum(b_x * b_x, axis=1) + b_apart * b_apart * (i_l * share)
        b_mean += b_apart * share
    p_out = p_means + i_s.to(tl.int64) * 2 * n_channels + o_c
    tl.store(p_out, b_mean, mask=m_c)
    tl.store(p_out + n_channels, b_squares, mask=m_c)


@triton.jit(do_not_specialize=["n_outer", "n_length", "n_span"])
def _channel_moments_kernel(
    p_means, p_mean, p_rstd, n_outer, n_inner, n_sets, n_channels, n_length, n_span, eps, B_E: tl.constexpr
):
    """Mean and 1/σ of a set: of n_outer parts of n_inner channels.

    p_means: float32 (parts, 2, C); there are n_sets sets to a sample. p_mean, p_rstd: float32 (sets,).
    """
    i_s = tl.program_id(0)
    p_set = p_means + (i_s // n_sets).to(tl.int64) * n_outer * 2 * n_channels + (i_s % n_sets) * n_inner
    n_spans, n_all = tl.cdiv(n_length, n_span), n_outer * n_inner
    total = (n_outer // n_spans * n_inner) * (n_length * 1.0)
    b_sum = tl.zeros((B_E,), dtype=tl.float32)
    for i_e in range(0, n_all, B_E):
        o_e = i_e + tl.arange(0, B_E)
        o_part = o_e // n_inner
        b_count = tl.minimum(n_length - o_part % n_spans * n_span, n_span).to(tl.float32)
        p_part = p_set + o_part.to(tl.int64) * 2 * n_channels + o_e % n_inner
        b_sum += tl.load(p_part, mask=o_e < n_all, other=0.0) * (b_count / total)
    mean = tl.sum(b_sum, axis=0)
    b_squares = tl.zeros((B_E,), dtype=tl.float32)
    for i_e in range(0, n_all, B_E):
        o_e = i_e + tl.arange(0, B_E)
        m_e, o_part = o_e < n_all, o_e // n_inner
        b_count = tl.minimum(n_length - o_part % n_spans * n_span, n_span).to(tl.float32)
        p_part = p_set + o_part.to(tl.int64) * 2 * n_channels + o_e % n_inner
        b_apart = tl.where(m_e, tl.load(p_part, mask=m_e, other=0.0) - mean, 0.0)
        b_squares += tl.load(p_part + n_channels, mask=m_e, other=0.0) + b_apart * b_apart * b_count
    tl.store(p_mean + i_s, mean)
    tl.store(p_rstd + i_s, 1.0 / tl.sqrt(tl.sum(b_squares, axis=0) / total + eps))


@triton.jit
def _place(n_rows, n_span, n_tiles, n_columns, B_K: tl.constexpr):
    """Of a program: its group, its number among those of the group, its sample, its first row, and that behind it.

    A span of n_span rows has programs of its own; it is a sample, or all rows.
    """
    n_groups = tl.cdiv(n_columns, 64)
    n_programs = tl.cdiv(tl.cdiv(n_span, B_K), n_tiles)
    i_p = (tl.program_id(0) // n_groups).to(tl.int64)
    i_n = i_p // n_programs
    begin = i_n * n_span + i_p % n_programs * (n_tiles * B_K)
    return tl.program_id(0) % n_groups, i_p, i_n, begin, tl.minimum(begin + n_tiles * B_K, (i_n + 1) * n_span)


@triton.jit
def _runs(i_g, n_columns, length):
    """Of a group, the first run that has a part in it, how many have, and the one of every column among them."""
    first = i_g * 64 // length
    last = (tl.minimum(i_g * 64 + 64, n_columns) - 1) // length
    return first, last - first + 1, (i_g * 64 + tl.arange(0, 64)) // length - first


@triton.jit
def _channel_of(o_k, run, n_channels, n_runs):
    """Of a run of every row: its channel, and its sample, int64 (B_K,). n_runs: of a row."""
    o_run = o_k * n_runs + run
    return o_run % n_channels, o_run // n_channels


@triton.jit(do_not_specialize=["seed", "n_fresh", "n_rows", "n_span", "n_tiles"])
def _pack_channels_kernel(
    p_x, p_seed, seed: tl.int64, n_fresh, p_mean, p_rstd, p_saved, p_codes, p_scales,
    n_rows, n_span, n_tiles, n_columns, row_bytes, n_channels, n_inner, n_sets, n_all, length,
    FIRST: tl.constexpr, COPY: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, IEEE: tl.constexpr,
    TAIL: tl.constexpr, B_K: tl.constexpr,
):  # fmt: skip
    """n_tiles tiles of B_K rows and one group.

    p_x: (n_rows, n_columns), contiguous. p_seed, seed, n_fresh: see known_seed. p_mean, p_rstd: float32 (n_all,), of
    every set; COPY: 1/σ is copied to p_saved. n_sets: of a sample, 0 where samples have none of their own. The others:
    see store_packed.
    """
    i_g, _, i_n, begin, end = _place(n_rows, n_span, n_tiles, n_columns, B_K)
    o_j = i_g * 64 + tl.arange(0, 64)
    b_rotation = rotation(known_seed(p_seed, seed, n_fresh), HALF)
    if COPY and tl.program_id(0) == 0:
        for i_s in range(0, n_all, 1024):
            o_s = i_s + tl.arange(0, 1024)
            tl.store(p_saved + o_s, tl.load(p_rstd + o_s, mask=o_s < n_all, other=0.0), mask=o_s < n_all)
    if FIRST:
        run, n_parts, b_part = _runs(i_g, n_columns, length)
    else:
        o_set = i_n * n_sets + o_j // n_inner
        b_mean = tl.load(p_mean + o_set, mask=o_j < n_columns, other=0.0)
        b_rstd = tl.load(p_rstd + o_set, mask=o_j < n_columns, other=0.0)
    for i_t in range(n_tiles):
        first = begin + i_t * B_K
        o_k = first + tl.arange(0, B_K)
        m_k = o_k < end
        m_x = m_k[:, None] & (o_j < n_columns)[None, :] if TAIL else m_k[:, None]
        b_x = tl.load(p_x + o_k[:, None] * n_columns + o_j[None, :], mask=m_x, other=0.0).to(tl.float32)
        if FIRST:
            for i_r in range(n_parts):
                o_c, o_n = _channel_of(o_k, run + i_r, n_channels, n_columns // length)
                o_set = o_n * n_sets + o_c // n_inner
                b_apart = b_x - tl.load(p_mean + o_set, mask=m_k, other=0.0)[:, None]
                b_scaled = b_apart * tl.load(p_rstd + o_set, mask=m_k, other=0.0)[:, None]
                b_x = tl.where((b_part == i_r)[None, :], b_scaled, b_x)
        else:
            b_x = (b_x - b_mean[None, :]) * b_rstd[None, :]
        b_x = tl.where(m_x, b_x, 0.0)
        b_row, b_column = tile_words(seed_again(p_seed, seed, n_fresh), first, i_g, B_K)
        store_packed(
            b_x.to(HALF), b_rotation, b_row, b_column, o_k, m_k, i_g, n_columns, row_bytes, p_codes, p_scales,
            BITS, IEEE, TAIL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "n_span", "n_tiles"])
def _channel_sums_kernel(
    p_y, p_seed, p_codes, p_scales, p_sums, n_rows, n_span, n_tiles, n_columns, row_bytes, share, length,
    FIRST: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, IEEE: tl.constexpr, TAIL: tl.constexpr,
    B_K: tl.constexpr,
):  # fmt: skip
    """n_tiles tiles of B_K rows and one group: sums of y, y ∘ h, y ∘ (1 + v / M) and h.

    p_y: (n_rows, n_columns), contiguous. share: 1 / M. p_sums: float32 (programs of a group, 4, n_columns), over the
    rows of a program; FIRST: (groups + runs of a row, 4, n_rows), over columns that a group and a run have in common,
    at the sum of their numbers. The others: see load_packed.
    """
    i_g, i_p, _, begin, end = _place(n_rows, n_span, n_tiles, n_columns, B_K)
    o_j = i_g * 64 + tl.arange(0, 64)
    b_rotation = rotation(tl.load(p_seed), HALF, True)
    if FIRST:
        run, n_parts, b_part = _runs(i_g, n_columns, length)
    else:
        b_one = tl.zeros((64,), dtype=tl.float32)
        b_product = tl.zeros((64,), dtype=tl.float32)
        b_less = tl.zeros((64,), dtype=tl.float32)
        b_normal = tl.zeros((64,), dtype=tl.float32)
    for i_t in range(n_tiles):
        first = begin + i_t * B_K
        o_k = first + tl.arange(0, B_K)
        m_k = o_k < end
        m_y = m_k[:, None] & (o_j < n_columns)[None, :] if TAIL else m_k[:, None]
        b_row, b_column = tile_words(tl.load(p_seed), first, i_g, B_K)
        b_h, b_scale = load_packed(
            p_codes, p_scales, b_rotation, b_row, b_column, o_k, m_k, i_g, n_columns, row_bytes, BITS, IEEE, TAIL
        )
        b_y = tl.load(p_y + o_k[:, None] * n_columns + o_j[None, :], mask=m_y, other=0.0).to(tl.float32)
        b_kept = 1.0 + b_scale * b_scale * (share / 12.0)
        if FIRST:
            for i_r in range(n_parts):
                m_r = (b_part == i_r)[None, :]
                b_yr, b_hr = tl.where(m_r, b_y, 0.0), tl.where(m_r, b_h, 0.0)
                b_sum = tl.sum(b_yr, axis=1)
                p_run = p_sums + (i_g + run + i_r).to(tl.int64) * 4 * n_rows + o_k
                tl.store(p_run, b_sum, mask=m_k)
                tl.store(p_run + n_rows, tl.sum(b_yr * b_h, axis=1), mask=m_k)
                tl.store(p_run + 2 * n_rows, b_sum * b_kept, mask=m_k)
                tl.store(p_run + 3 * n_rows, tl.sum(b_hr, axis=1), mask=m_k)
        else:
            b_one += tl.sum(b_y, axis=0)
            b_product += tl.sum(b_y * b_h, axis=0)
            b_less += tl.sum(b_y * b_kept[:, None], axis=0)
            b_normal += tl.sum(b_h, axis=0)
    if not FIRST:
        p_sum, m_j = p_sums + i_p * 4 * n_columns + o_j, o_j < n_columns
        tl.store(p_sum, b_one, mask=m_j)
        tl.store(p_sum + n_columns, b_product, mask=m_j)
        tl.store(p_sum + 2 * n_columns, b_less, mask=m_j)
        tl.store(p_sum + 3 * n_columns, b_normal, mask=m_j)


@triton.jit(do_not_specialize=["n_rows", "n_outer"])
def _channel_totals_kernel(
    p_sums, p_gamma, p_slope, p_shift, p_weight, p_bias, n_rows, n_columns, n_outer, n_inner, n_sets, n_slots,
    n_channels, share, length,
    FIRST: tl.constexpr, HAS_GAMMA: tl.constexpr, OF_SETS: tl.constexpr, SUMS: tl.constexpr, B_E: tl.constexpr,
):  # fmt: skip
    """⟨γ ∘ y, h⟩ / M of a set, and the mean of γ ∘ y ∘ (1 + v / M) less that times h; SUMS: dγ and dβ of a channel.

    p_sums: What _channel_sums_kernel wrote; n_outer: samples or programs of a set. n_inner: channels. n_slots: sums of
    a run, at most. p_slope, p_shift: float32, of every set. p_weight, p_bias: float32 (C,).
    """
    i_s = tl.program_id(0)
    i_n = i_s // n_sets
    n_each = n_inner * n_slots
    n_all = n_outer * n_each
    b_one = tl.zeros((B_E,), dtype=tl.float32)
    b_product = tl.zeros((B_E,), dtype=tl.float32)
    b_weighted = tl.zeros((B_E,), dtype=tl.float32)
    b_less = tl.zeros((B_E,), dtype=tl.float32)
    b_normal = tl.zeros((B_E,), dtype=tl.float32)
    for i_e in range(0, n_all, B_E):
        o_e = i_e + tl.arange(0, B_E)
        m_e = o_e < n_all
        o_c = i_s % n_sets * n_inner + o_e % n_each // n_slots
        o_n = (i_n * n_outer + o_e // n_each).to(tl.int64)
        if FIRST:
            n_runs = n_columns // length
            run, slot = o_c % n_runs, o_e % n_slots
            group = run * length // 64 + slot
            m_e = m_e & (group <= (run * length + length - 1) // 64)
            p_sum = p_sums + (group + run).to(tl.int64) * 4 * n_rows + o_n * (n_channels // n_runs) + o_c // n_runs
            apart = n_rows
        else:
            p_sum, apart = p_sums + o_n * 4 * n_columns + o_c, n_columns
        gamma = tl.load(p_gamma + o_c, mask=m_e, other=0.0).to(tl.float32) if HAS_GAMMA else 1.0
        b_yh = tl.load(p_sum + apart, mask=m_e, other=0.0)
        b_product += b_yh
        b_weighted += b_yh * gamma
        b_less += tl.load(p_sum + 2 * apart, mask=m_e, other=0.0) * gamma
        b_normal += tl.load(p_sum + 3 * apart, mask=m_e, other=0.0)
        if SUMS:
            b_one += tl.load(p_sum, mask=m_e, other=0.0)
    if OF_SETS:
        slope = tl.sum(b_weighted, axis=0) * share
        tl.store(p_slope + i_s, slope)
        tl.store(p_shift + i_s, (tl.sum(b_less, axis=0) - slope * tl.sum(b_normal, axis=0)) * share)
    if SUMS:
        tl.store(p_weight + i_s, tl.sum(b_product, axis=0).to(p_weight.dtype.element_ty))
        tl.store(p_bias + i_s, tl.sum(b_one, axis=0).to(p_bias.dtype.element_ty))


@triton.jit(do_not_specialize=["n_rows", "n_span", "n_tiles"])
def _channel_backward_kernel(
    p_y, p_seed, p_gamma, p_codes, p_scales, p_rstd, p_slope, p_shift, p_out,
    n_rows, n_span, n_tiles, n_columns, row_bytes, n_channels, n_inner, n_sets, share, length,
    FIRST: tl.constexpr, HAS_GAMMA: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, IEEE: tl.constexpr,
    TAIL: tl.constexpr, B_K: tl.constexpr,
):  # fmt: skip
    """n_tiles tiles of B_K rows and one group: their gradient.

    p_gamma: (C,). p_rstd, p_slope, p_shift: float32, of every set. p_out: (n_rows, n_columns), contiguous. The others:
    see _pack_channels_kernel and _channel_sums_kernel.
    """
    i_g, _, i_n, begin, end = _place(n_rows, n_span, n_tiles, n_columns, B_K)
    o_j = i_g * 64 + tl.arange(0, 64)
    b_rotation = rotation(tl.load(p_seed), HALF, True)
    if FIRST:
        run, n_parts, b_part = _runs(i_g, n_columns, length)
    else:
        m_j, o_set = o_j < n_columns, i_n * n_sets + o_j // n_inner
        b_rstd = tl.load(p_rstd + o_set, mask=m_j, other=0.0)
        b_factor = b_rstd * tl.load(p_gamma + o_j, mask=m_j, other=0.0).to(tl.float32) if HAS_GAMMA else b_rstd
        b_slope = b_rstd * tl.load(p_slope + o_set, mask=m_j, other=0.0)
        b_shift = b_rstd * tl.load(p_shift + o_set, mask=m_j, other=0.0)
    for i_t in range(n_tiles):
        first = begin + i_t * B_K
        o_k = first + tl.arange(0, B_K)
        m_k = o_k < end
        m_y = m_k[:, None] & (o_j < n_columns)[None, :] if TAIL else m_k[:, None]
        b_row, b_column = tile_words(tl.load(p_seed), first, i_g, B_K)
        b_h, b_scale = load_packed(
            p_codes, p_scales, b_rotation, b_row, b_column, o_k, m_k, i_g, n_columns, row_bytes, BITS, IEEE, TAIL
        )
        p_tile = o_k[:, None] * n_columns + o_j[None, :]
        b_y = tl.load(p_y + p_tile, mask=m_y, other=0.0).to(tl.float32)
        b_kept = 1.0 + b_scale * b_scale * (share / 12.0)
        if FIRST:
            for i_r in range(n_parts):
                o_c, o_n = _channel_of(o_k, run + i_r, n_channels, n_columns // length)
                o_set = o_n * n_sets + o_c // n_inner
                b_rstd = tl.load(p_rstd + o_set, mask=m_k, other=0.0)
                b_factor = b_rstd * b_kept
                if HAS_GAMMA:
                    b_factor *= tl.load(p_gamma + o_c, mask=m_k, other=0.0).to(tl.float32)
                b_slope = b_rstd * tl.load(p_slope + o_set, mask=m_k, other=0.0)
                b_shift = b_rstd * tl.load(p_shift + o_set, mask=m_k, other=0.0)
                b_x = b_y * b_factor[:, None] - b_h * b_slope[:, None] - b_shift[:, None]
                b_h = tl.where((b_part == i_r)[None, :], b_x, b_h)
        else:
            b_h = b_y * b_kept[:, None] * b_factor[None, :] - b_h * b_slope[None, :] - b_shift[None, :]
        tl.store(p_out + p_tile, b_h.to(p_out.dtype.element_ty), mask=m_y)


def _sets(shape: torch.Size, groups: int) -> tuple[int, int, int, int]:
    """Channels of a set, sets of a sample, 0 for BatchNorm, all sets, and the elements M of one."""
    samples, places, channels, length = shape
    inner = channels // groups if groups else 1
    sets = samples * groups if groups else channels
    return inner, groups, sets, samples * places * channels * length // max(1, sets)


def tile_rows_for(is_first: bool, is_tail: bool, of_channels: int) -> int:
    """Rows of a tile: fewer than others have where runs and a short group need registers."""
    return 16 if is_first and is_tail else of_channels


def _tiles(x: torch.Tensor, rows: int, columns: int, groups: int) -> tuple[int, int, int, tuple[int]]:
    """Rows of a tile, and of a span, tiles of a program, and the grid."""
    is_tail, count, shape = columns % GROUP != 0, cdiv(columns, GROUP), x.shape
    size = tile_rows_for(shape[3] > 1, is_tail, rows_for(x, x.dtype, is_tail))
    span = shape[1] if groups and shape[3] == 1 else rows
    spans = rows // span
    taken, _ = tiles(rows, count, size)
    taken = min(taken, cdiv(span, size))
    return size, span, taken, (spans * cdiv(cdiv(span, size), taken) * count,)


def _statistics(x: torch.Tensor, eps: float, groups: int, rstd: torch.Tensor) -> torch.Tensor:
    """Write 1/σ of every set, and return the means."""
    samples, places, channels, length = x.shape
    inner, of_sample, sets, _ = _sets(x.shape, groups)
    many, is_last = places * length, length == 1
    block = min(64, triton.next_power_of_2(channels)) if is_last else max(1, _TILE // triton.next_power_of_2(many))
    block, line = block, _TILE // block
    span = _SPAN * line
    spans = cdiv(many, span)
    means = torch.empty(samples * spans, 2, channels, dtype=torch.float32, device=x.device)
    mean = torch.empty(sets, dtype=torch.float32, device=x.device)
    launch(
        _channel_statistics_kernel, (samples * spans * cdiv(channels, block),),
        x, means, channels, many, _SPAN, 1 if is_last else many, channels if is_last else 1, B_C=block, B_L=line,
    )  # fmt: skip
    launch(
        _channel_moments_kernel, (sets,),
        means, mean, rstd, spans if groups else samples * spans, inner, of_sample or channels, channels, many, span,
        eps, B_E=256,
    )  # fmt: skip
    return mean


def pack_channels(
    x: torch.Tensor,
    bits: int,
    seed: Seed,
    eps: float,
    groups: int,
    matrix: tuple[int, int],
    mean: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalize channels and round them to ``bits`` per element.

    Args:
        x: float16, bfloat16 or float32, shape (N, S, C, B), of which S or B is 1, contiguous.
        bits: 8, 4, 3 or 2.
        seed: int64, shape (1,), on the device of ``x``; or to be written there, see ``given``.
        eps: What is added to the variance.
        groups: Of the channels of a sample, normalized together; 0 where all samples are.
        matrix: Rows and columns that ``x`` is packed in, whole runs of B elements.
        mean: Of every set, float32, shape (C,) or (N · groups,); None computes it, and 1/σ.
        rstd: 1/σ, the same.
        out: The result is written into them, contiguous; None makes them.

    Returns:
        Codes, uint8, shape (rows, ⌈columns·bits/8⌉), scales, uint8, shape (rows, ⌈columns/64⌉), and 1/σ of every set.
    """
    (rows, columns), (inner, of_sample, sets, _) = matrix, _sets(x.shape, groups)
    if out is None:
        out = *empty_sketch(rows, columns, bits, x), torch.empty(sets, dtype=torch.float32, device=x.device)
    codes, scales, saved = out
    seeds = given(seed, x.numel() > 0)
    if x.numel():
        is_given = mean is not None and rstd is not None
        mean, rstd = (mean, rstd) if is_given else (_statistics(x, eps, groups, saved), saved)
        size, span, taken, grid = _tiles(x, rows, columns, groups)
        launch(
            _pack_channels_kernel, grid,
            x, *seeds, mean, rstd, saved if is_given else None, codes, scales, rows, span, taken, columns,
            codes.shape[1], x.shape[2], inner, of_sample, sets, x.shape[3],
            FIRST=x.shape[3] > 1, COPY=is_given, BITS=bits, HALF=small_type(x.dtype),
            IEEE=is_ieee(), TAIL=columns % GROUP != 0, B_K=size,
        )  # fmt: skip
    elif rstd is None:
        saved.fill_(math.nan)  # of no elements
    else:
        saved.copy_(rstd)
    return codes, scales, saved


def channel_gradients(
    y: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    rstd: torch.Tensor,
    bits: int,
    seed: torch.Tensor,
    gamma: torch.Tensor | None,
    groups: int,
    matrix: tuple[int, int],
    *,
    dtype: torch.dtype | None = None,
    sums: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of a norm over channels from what ``pack_channels`` has made.

    Args:
        y: Gradient with respect to the output, float16, bfloat16 or float32, shape (N, S, C, B), contiguous.
        codes: uint8, shape (rows, ⌈columns·bits/8⌉), contiguous.
        scales: uint8, shape (rows, ⌈columns/64⌉), contiguous.
        rstd: Of every set, float32, contiguous.
        bits: 8, 4, 3 or 2.
        seed: The seed it was packed with.
        gamma: γ, shape (C,); None is 1.
        groups: As it was packed with, as ``matrix``.
        matrix: Rows and columns.
        dtype: dtype of dX; None is that of ``y``.
        sums: Whether dγ and dβ are needed.

    Returns:
        dX, shape of ``y``, which adds up to 0 in every set, as the known variance of the copy is taken out and the
        mean; dγ and dβ, float32, shape (C,), or (0,).
    """
    (rows, columns), (samples, _, channels, length) = matrix, y.shape
    inner, of_sample, sets, elements = _sets(y.shape, groups)
    gamma = None if gamma is None else gamma.contiguous()
    x = torch.empty(y.shape, dtype=dtype or y.dtype, device=y.device)
    make = torch.empty if y.numel() else torch.zeros
    weight, bias = (make(channels if sums else 0, dtype=torch.float32, device=y.device) for _ in range(2))
    if y.numel():
        is_first, count = length > 1, scales.shape[1]
        size, span, taken, grid = _tiles(y, rows, columns, groups)
        parts = (count + columns // length, 4, rows) if is_first else (grid[0] // count, 4, columns)
        partial = torch.empty(parts, dtype=torch.float32, device=y.device)
        slope, shift = (torch.empty(sets, dtype=torch.float32, device=y.device) for _ in range(2))
        how = {
            "BITS": bits, "HALF": small_type(y.dtype), "IEEE": is_ieee(), "TAIL": columns % GROUP != 0, "B_K": size,
        }  # fmt: skip
        shape, share = (rows, span, taken, columns, codes.shape[1]), 1.0 / elements
        launch(
            _channel_sums_kernel, grid, y, seed, codes, scales, partial, *shape, share, length, FIRST=is_first, **how
        )
        outer, slots = samples if is_first else parts[0], length // GROUP + 2 if is_first else 1
        # Of sets, and where those are not channels of all samples, once more of these.
        for is_of_sets, is_of_channels in [(True, sums)] if not groups else [(True, False), (False, True)][: 1 + sums]:
            of_channels = not is_of_sets or not groups
            kept = (outer, 1, channels) if of_channels else (outer // samples, inner, groups)
            launch(
                _channel_totals_kernel, (channels if of_channels else sets,),
                partial, gamma if is_of_sets else None, slope, shift, weight, bias, rows, columns, *kept, slots,
                channels, share, length, FIRST=is_first, HAS_GAMMA=is_of_sets and gamma is not None, OF_SETS=is_of_sets,
                SUMS=is_of_channels, B_E=256,
            )  # fmt: skip
        launch(
            _channel_backward_kernel, grid,
            y, seed, gamma, codes, scales, rstd, slope, shift, x, *shape, channels, inner, of_sample, share, length,
            FIRST=is_first, HAS_GAMMA=gamma is not None, **how,
        )  # fmt: skip
    return x, weight, bias
