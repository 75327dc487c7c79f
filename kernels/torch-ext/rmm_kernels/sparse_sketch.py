"""sparse_sketch: rows of SᵀM that sum few rows of M. CountSketch from the seed alone, or a gather with scales."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .draws import as_int64, known_seed, words
from .groups import GROUP, store_tile
from .launch import Seed, cdiv, given, is_ieee, launch
from .packing import empty_sketch


@triton.jit(do_not_specialize=["seed", "n_fresh", "n_words", "n_segments", "n_rows"])
def _hash_kernel(p_seed, seed: tl.int64, n_fresh, p_words, p_shifts, n_words, n_segments, n_rows, B_N: tl.constexpr):
    """B_N words of 32 signs, and as many shifts: drawn once, where every tile would draw them again.

    p_seed, seed, n_fresh: see known_seed. p_words: int32 (⌈N/32⌉,). p_shifts: int64 (⌈N/K⌉,), the first of which is 0.
    """
    o_n = tl.program_id(0).to(tl.int64) * B_N + tl.arange(0, B_N)
    first, second, _, _ = words(known_seed(p_seed, seed, n_fresh), o_n, 0)
    b_shifts = ((second.to(tl.uint64) * as_int64(n_rows).to(tl.uint64)) >> 32).to(tl.int64)
    tl.store(p_words + o_n, first.to(tl.int32, bitcast=True), mask=o_n < n_words)
    tl.store(p_shifts + o_n, tl.where(o_n == 0, 0, b_shifts), mask=o_n < n_segments)


@triton.jit(do_not_specialize=["n_tokens", "n_rows"])
def _sparse_sketch_kernel(
    p_m, p_seed, p_words, p_shifts, p_order, p_count, p_index, p_scale, p_z, p_scales,
    n_tokens, n_rows, n_columns, stride, row_bytes,
    HASHED: tl.constexpr, MASKED: tl.constexpr, BITS: tl.constexpr, IEEE: tl.constexpr, TAIL: tl.constexpr,
    B_K: tl.constexpr, B_D: tl.constexpr,
):  # fmt: skip
    """One tile of SᵀM, (B_K, B_D).

    p_m: (N, D), rows ``stride`` apart. p_seed: int64 (1,). p_words, p_shifts: see _hash_kernel. p_order: int64 (N,),
    valid rows first. p_count: int64 (1,), how many are valid. p_index: int32 or int64 (K,), and p_scale:
    float32 (K,), the gathered rows. p_z: (K, D), or codes. row_bytes, p_scales: see store_packed.
    """
    i_d = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0).to(tl.int64) * B_K
    o_k = begin + tl.arange(0, B_K)
    o_d = i_d * B_D + tl.arange(0, B_D)
    m_k, m_d = o_k < n_rows, o_d < n_columns
    b_z = tl.zeros((B_K, B_D), dtype=tl.float32)
    if HASHED:
        count = tl.load(p_count) if MASKED else n_tokens
        for i_s in range(tl.cdiv(count, n_rows)):
            shift = tl.load(p_shifts + i_s)
            o_t = tl.where(o_k >= shift, o_k - shift, o_k + n_rows - shift) + as_int64(i_s) * n_rows
            m_t = m_k & (o_t < count)
            b_word = tl.load(p_words + o_t // 32, mask=m_t, other=0)
            b_sign = tl.where(i_s == 0, 1.0, 1.0 - 2.0 * ((b_word >> (o_t % 32).to(tl.int32)) & 1).to(tl.float32))
            o_row = tl.load(p_order + o_t, mask=m_t, other=0) if MASKED else o_t
            m_m = m_t[:, None] & m_d[None, :]
            b_m = tl.load(p_m + o_row[:, None] * stride + o_d[None, :], mask=m_m, other=0.0)
            b_z += b_m.to(tl.float32) * b_sign[:, None]
    else:
        o_row = tl.load(p_index + o_k, mask=m_k, other=0).to(tl.int64)
        b_scale = tl.load(p_scale + o_k, mask=m_k, other=0.0)
        m_m = (m_k & (b_scale != 0))[:, None] & m_d[None, :]
        b_m = tl.load(p_m + o_row[:, None] * stride + o_d[None, :], mask=m_m, other=0.0)
        b_z = b_m.to(tl.float32) * b_scale[:, None]
    seed = 0 if BITS == 0 else tl.load(p_seed)
    store_tile(b_z, seed, begin, m_k, i_d, n_columns, row_bytes, p_z, p_scales, BITS, IEEE, TAIL, B_K, B_D)


def _hash(seeds: Sequence[Any], tokens: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    n_words, n_segments = cdiv(tokens, 32), cdiv(tokens, rows)
    words = torch.empty(n_words, dtype=torch.int32, device=seeds[0].device)
    shifts = torch.empty(n_segments, dtype=torch.int64, device=seeds[0].device)
    grid = (cdiv(max(n_words, n_segments), 256),)
    launch(_hash_kernel, grid, *seeds, words, shifts, n_words, n_segments, rows, B_N=256)
    return words, shifts


def sparse_sketch(
    matrix: torch.Tensor,
    seed: Seed | None,
    rows: int,
    *,
    index: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    bits: int | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return SᵀM for CountSketch, or, with ``index`` and ``scale``, the rows M[index] · scale.

    Args:
        matrix: M, float16, bfloat16 or float32, shape (N, D), any row stride.
        seed: int64, shape (1,), on the device of ``matrix``; or to be written there, see ``given``. A gather that is
            not packed needs none.
        rows: K.
        index: Rows to gather, int32 or int64, shape (K,).
        scale: Their scales, float32, shape (K,). Where it is 0, the row is not read and the result is 0.
        order: Rows of M, int64, shape (N,): the valid ones first. For CountSketch; None is all in order.
        count: n, how many rows count, int64, shape (1,). With n ≤ K the result is the rows themselves.
        bits: 8, 4 or 2 packs the result as it is made; None does not.
        dtype: Of the result where it is not packed; None is that of ``matrix``.

    Returns:
        Shape (K, D); or codes and scales, see :func:`rmm_kernels.pack`.
    """
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    tokens, columns = matrix.shape
    z, scales = empty_sketch(rows, columns, bits, matrix, dtype)
    tile = (16, 128) if bits is None else (32, 64)
    seeds = given(seed, z.numel() > 0 and index is None)  # by the first of two kernels
    if z.numel():
        grid = (cdiv(rows, tile[0]), cdiv(columns, tile[1]))
        signs, shifts = (None, None) if index is not None else _hash(seeds, tokens, rows)
        launch(
            _sparse_sketch_kernel, grid,
            matrix, seeds[0], signs, shifts, order, count, index, scale, z, scales,
            tokens, rows, columns, matrix.stride(0), z.shape[1],
            HASHED=index is None, MASKED=order is not None, BITS=bits or 0, IEEE=is_ieee(),
            TAIL=columns % GROUP != 0,
            B_K=tile[0], B_D=tile[1],
        )  # fmt: skip
    return z if scales is None else (z, scales)
