"""dense_sketch: Gaussian, Rademacher and Hadamard, block-diagonal. Tiles of S are made in registers, never stored."""

import torch
import triton
import triton.language as tl

from .draws import as_int64, known_seed, normals, parity, signs, words
from .groups import GROUP, store_tile
from .launch import Seed, cdiv, given, is_ieee, launch, precision, upcast
from .packing import empty_sketch

KINDS = ("gaussian", "rademacher", "hadamard")


@triton.jit
def _entries(seed, o_t, o_r, n_rows, KIND: tl.constexpr, B_T: tl.constexpr, B_R: tl.constexpr):
    """A tile of √K·S, float32 (B_T, B_R), for tokens o_t and the B_R rows from o_r on; not for Hadamard.

    o_t: int64 (B_T,). o_r: int64 scalar, a multiple of B_R. n_rows: rows per block.
    """
    if KIND == 0:
        o_group = (o_r // 4) + tl.arange(0, B_R // 4)
        counter = o_t[:, None] * ((n_rows + 3) // 4) + o_group[None, :]
        word_0, word_1, word_2, word_3 = words(seed, counter, 0)
        lane_0, lane_1 = normals(word_0, word_1)
        lane_2, lane_3 = normals(word_2, word_3)
        lanes = tl.join(tl.join(lane_0, lane_2), tl.join(lane_1, lane_3))
        return tl.reshape(lanes, (B_T, B_R))
    else:
        o_group = (o_r // 32) + tl.arange(0, B_R // 32)
        word, _, _, _ = words(seed, o_t[:, None] * ((n_rows + 31) // 32) + o_group[None, :], 0)
        bits = (word[:, :, None] >> tl.arange(0, 32).to(tl.uint32)[None, None, :]) & 1
        return tl.reshape(1.0 - 2.0 * bits.to(tl.float32), (B_T, B_R))


@triton.jit(do_not_specialize=["seed", "n_fresh", "n_tokens", "n_blocks", "block", "n_rows"])
def _dense_sketch_kernel(
    p_m, p_seed, seed: tl.int64, n_fresh, p_order, p_count, p_index, p_z, p_scales,
    n_tokens, n_blocks, block, n_rows, n_columns, stride, row_bytes, factor,
    KIND: tl.constexpr, MASKED: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr, IEEE: tl.constexpr,
    TAIL: tl.constexpr, UPCAST: tl.constexpr, B_T: tl.constexpr, B_R: tl.constexpr, B_D: tl.constexpr,
):  # fmt: skip
    """One tile of one block's rows, (B_R, B_D).

    p_m: (N, D), rows ``stride`` apart. p_seed, seed, n_fresh: see known_seed. p_order: int64 (N,), valid rows first.
    p_count: int64 (1,). p_index: int64 (n_rows,), rows of the Hadamard matrix. p_z: (blocks · n_rows, D), or codes.
    row_bytes, p_scales: see store_packed. block: tokens per block. factor: 1/√n_rows.
    """
    i_b = tl.program_id(0).to(tl.int64)
    i_d = tl.program_id(2).to(tl.int64)
    i_r = tl.program_id(1).to(tl.int64) * B_R
    o_r = i_r + tl.arange(0, B_R)
    o_d = i_d * B_D + tl.arange(0, B_D)
    m_r, m_d = o_r < n_rows, o_d < n_columns
    o_k = i_b * n_rows + o_r
    seed = known_seed(p_seed, seed, n_fresh)
    count = tl.load(p_count) if MASKED else n_tokens
    length = as_int64(block)
    if MASKED and n_blocks > 1:
        length = (count + n_blocks - 1) // n_blocks
    first = i_b * length
    last = tl.minimum(first + length, count)
    direct = count <= n_rows * n_blocks
    b_z = tl.zeros((B_R, B_D), dtype=tl.float32)
    if direct:
        m_t = m_r & (o_k < count)
        o_row = tl.load(p_order + o_k, mask=m_t, other=0) if MASKED else o_k
        p_in = p_m + o_row[:, None] * stride + o_d[None, :]
        b_z += tl.load(p_in, mask=m_t[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    else:
        for i_t in range(first, last, B_T):
            o_t = i_t + tl.arange(0, B_T).to(tl.int64)
            m_t = o_t < last
            o_row = tl.load(p_order + o_t, mask=m_t, other=0) if MASKED else o_t
            p_in = p_m + o_row[:, None] * stride + o_d[None, :]
            b_m = tl.load(p_in, mask=m_t[:, None] & m_d[None, :], other=0.0)
            if KIND == 2:
                o_index = tl.load(p_index + o_r, mask=m_r, other=0)
                b_s = (1.0 - 2.0 * parity((o_t - first)[:, None] & o_index[None, :]).to(tl.float32)) * signs(seed, o_t)[
                    :, None
                ]
            else:
                b_s = _entries(seed, o_t, i_r, n_rows, KIND, B_T, B_R)
            b_s = b_s.to(b_m.dtype)
            if UPCAST:
                b_s, b_m = b_s.to(tl.float32), b_m.to(tl.float32)
            b_z += tl.dot(tl.trans(b_s), b_m, input_precision=PRECISION)
        b_z = b_z * factor
    begin = i_b * n_rows + i_r
    store_tile(b_z, seed, begin, m_r, i_d, n_columns, row_bytes, p_z, p_scales, BITS, IEEE, TAIL, B_R, B_D)


def dense_sketch(
    matrix: torch.Tensor,
    seed: Seed,
    kind: str,
    block: int,
    rows: int,
    *,
    index: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    bits: int | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return SᵀM for a dense, block-diagonal S.

    Args:
        matrix: M, float16, bfloat16 or float32, shape (N, D), any row stride.
        seed: int64, shape (1,), on the device of ``matrix``; or to be written there, see ``given``.
        kind: "gaussian", "rademacher" or "hadamard".
        block: Tokens per block; N is one block.
        rows: Rows per block.
        index: The rows of the Hadamard matrix that are selected, int64, shape (rows,).
        order: Rows of M, int64, shape (N,): the valid ones first; None is all in order.
        count: n, how many rows count, int64, shape (1,). The blocks share them evenly.
        bits: 8, 4 or 2 packs the result as it is made; None does not.
        dtype: Of the result where it is not packed; None is that of ``matrix``.

    Returns:
        Shape (⌈N/block⌉ · rows, D); or codes and scales, see :func:`rmm_kernels.pack`.
    """
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    tokens, columns = matrix.shape
    blocks = cdiv(tokens, block)
    z, scales = empty_sketch(blocks * rows, columns, bits, matrix, dtype)
    seeds = given(seed, z.numel() > 0)
    if z.numel():
        grid = (blocks, cdiv(rows, 32), cdiv(columns, 64))
        launch(
            _dense_sketch_kernel, grid,
            matrix, *seeds, order, count, index, z, scales,
            tokens, blocks, block, rows, columns, matrix.stride(0), z.shape[1], rows**-0.5,
            KIND=KINDS.index(kind), MASKED=order is not None, BITS=bits or 0, PRECISION=precision(),
            IEEE=is_ieee(), TAIL=columns % GROUP != 0, UPCAST=upcast(), B_T=32, B_R=32, B_D=64,
        )  # fmt: skip
    return z if scales is None else (z, scales)
