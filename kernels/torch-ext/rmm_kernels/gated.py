"""pack_gated, gate_and_pack and apply_gated: the packed products of a gated MLP, in one pass over its activations."""

import torch
import triton
import triton.language as tl

from .derivatives import normal_cdf
from .draws import known_seed, seed_again
from .groups import GROUP, load_packed, program_place, rotation, row_words, store_packed, tile_words
from .launch import Seed, cdiv, given, is_ieee, launch, places, product_type, rows_for, small_type
from .packing import code_bytes, empty_sketch, tiles

_ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")


@triton.jit
def _activate(b_a, ACTIVATION: tl.constexpr):
    """act(a) and act'(a), float32."""
    if ACTIVATION == 0:
        b_phi, b_e = normal_cdf(b_a)
        return b_a * b_phi, b_phi + b_a * (b_e * 0.3989422804014327)
    elif ACTIVATION == 3:
        return tl.where(b_a <= 0, 0.0, b_a), tl.where(b_a <= 0, 0.0, 1.0)
    else:
        b_inner = b_a
        b_slope = b_a * 0 + 1.0
        if ACTIVATION == 1:
            b_inner = b_a * (1.5957691216057308 + 0.07135481627159628 * b_a * b_a)
            b_slope = 1.5957691216057308 + 0.21406444881478884 * b_a * b_a
        b_sigmoid = tl.sigmoid(b_inner)
        return b_a * b_sigmoid, b_sigmoid + b_a * b_slope * (b_sigmoid * (1.0 - b_sigmoid))


@triton.jit(do_not_specialize=["seed", "seed_s", "n_fresh", "n_rows", "n_tiles"])
def _pack_gated_kernel(
    p_a, p_b, p_index, p_seed, seed: tl.int64, seed_s: tl.int64, n_fresh, p_codes, p_scales, p_s_codes, p_s_scales,
    n_rows, n_tiles, n_columns, stride, stride_b, row_bytes,
    ACTIVATION: tl.constexpr, BITS: tl.constexpr, HAS_INDEX: tl.constexpr, HAS_P: tl.constexpr, HAS_S: tl.constexpr,
    HALF: tl.constexpr, IEEE: tl.constexpr, TAIL: tl.constexpr, B_K: tl.constexpr,
):  # fmt: skip
    """n_tiles tiles of B_K rows and one group.

    p_a, p_b: (N, C), rows ``stride`` and ``stride_b`` apart. p_index: int64 (n,). p_seed: int64 (2,), of p and of s;
    seed, seed_s, n_fresh: see known_seed. p_codes, p_scales, p_s_codes, p_s_scales: see store_packed. HALF: the dtype
    of tiles' products, see rotated.
    """
    i_g, o_j, first = program_place(n_columns, n_tiles, B_K)
    first_p = known_seed(p_seed, seed, n_fresh)
    first_s = known_seed(p_seed + 1, seed_s, n_fresh)
    if HAS_P:
        b_rotation_p = rotation(first_p, HALF)
    if HAS_S:
        b_rotation_s = rotation(first_s, HALF)
    for i_t in range(n_tiles):
        begin = first + i_t * B_K
        o_k = begin + tl.arange(0, B_K)
        m_k = o_k < n_rows
        m_z = m_k[:, None] & (o_j < n_columns)[None, :] if TAIL else m_k[:, None]
        o_row = tl.load(p_index + o_k, mask=m_k, other=0) if HAS_INDEX else o_k
        p_gate = p_a + o_row[:, None] * stride + o_j[None, :]
        b_s, b_p = _activate(tl.load(p_gate, mask=m_z, other=0.0).to(tl.float32), ACTIVATION)
        if HAS_P:
            b_p *= tl.load(p_b + o_row[:, None] * stride_b + o_j[None, :], mask=m_z, other=0.0).to(tl.float32)
            b_row, b_column = tile_words(seed_again(p_seed, seed, n_fresh), begin, i_g, B_K)
            store_packed(
                b_p, b_rotation_p, b_row, b_column, o_k, m_k, i_g, n_columns, row_bytes, p_codes, p_scales,
                BITS, IEEE, TAIL,
            )  # fmt: skip
        if HAS_S:
            if tl.float32 == HALF:  # from the cache: a tile that stays in registers meanwhile spills
                b_s, _ = _activate(tl.load(p_gate, mask=m_z, other=0.0).to(tl.float32), ACTIVATION)
            b_row, b_column = tile_words(seed_again(p_seed + 1, seed_s, n_fresh), begin, i_g, B_K)
            store_packed(
                b_s, b_rotation_s, b_row, b_column, o_k, m_k, i_g, n_columns, row_bytes, p_s_codes, p_s_scales,
                BITS, IEEE, TAIL,
            )  # fmt: skip


@triton.jit(do_not_specialize=["seed", "seed_s", "n_fresh", "n_rows", "n_tiles"])
def _gate_kernel(
    p_a, p_b, p_place, p_seed, seed: tl.int64, seed_s: tl.int64, n_fresh, p_out,
    p_codes, p_scales, p_s_codes, p_s_scales, n_rows, n_tiles, n_columns, stride, stride_b, row_bytes,
    ACTIVATION: tl.constexpr, BITS: tl.constexpr, HAS_PLACE: tl.constexpr, HAS_P: tl.constexpr, HAS_S: tl.constexpr,
    HALF: tl.constexpr, IEEE: tl.constexpr, TAIL: tl.constexpr, B_K: tl.constexpr,
):  # fmt: skip
    """n_tiles tiles of B_K rows and one group.

    p_place: int64 (N,), the row of codes, or −1. p_out: (N, C), contiguous. The others: see _pack_gated_kernel.
    """
    i_g, o_j, first = program_place(n_columns, n_tiles, B_K)
    first_p = known_seed(p_seed, seed, n_fresh)
    first_s = known_seed(p_seed + 1, seed_s, n_fresh)
    if HAS_P:
        b_rotation_p = rotation(first_p, HALF)
    if HAS_S:
        b_rotation_s = rotation(first_s, HALF)
    for i_t in range(n_tiles):
        begin = first + i_t * B_K
        o_n = begin + tl.arange(0, B_K)
        m_n = o_n < n_rows
        m_z = m_n[:, None] & (o_j < n_columns)[None, :] if TAIL else m_n[:, None]
        o_k = tl.load(p_place + o_n, mask=m_n, other=-1) if HAS_PLACE else o_n
        m_k = (o_k >= 0) & m_n
        o_k = tl.maximum(o_k, 0)
        p_gate = p_a + o_n[:, None] * stride + o_j[None, :]
        b_s, b_p = _activate(tl.load(p_gate, mask=m_z, other=0.0).to(tl.float32), ACTIVATION)
        b_b = tl.load(p_b + o_n[:, None] * stride_b + o_j[None, :], mask=m_z, other=0.0).to(tl.float32)
        b_out = b_s.to(p_out.dtype.element_ty).to(tl.float32) * b_b  # rounded twice, as the modules do
        tl.store(p_out + o_n[:, None] * n_columns + o_j[None, :], b_out.to(p_out.dtype.element_ty), mask=m_z)
        if HAS_P:
            b_row, b_column = tile_words(seed_again(p_seed, seed, n_fresh), begin, i_g, B_K)
            if HAS_PLACE:
                b_row = row_words(seed_again(p_seed, seed, n_fresh), o_k)
            store_packed(
                b_p * b_b, b_rotation_p, b_row, b_column, o_k, m_k, i_g, n_columns, row_bytes, p_codes, p_scales,
                BITS, IEEE, TAIL,
            )  # fmt: skip
        if HAS_S:
            if tl.float32 == HALF:  # as in _pack_gated_kernel
                b_s, _ = _activate(tl.load(p_gate, mask=m_z, other=0.0).to(tl.float32), ACTIVATION)
            b_row, b_column = tile_words(seed_again(p_seed + 1, seed_s, n_fresh), begin, i_g, B_K)
            if HAS_PLACE:
                b_row = row_words(seed_again(p_seed + 1, seed_s, n_fresh), o_k)
            store_packed(
                b_s, b_rotation_s, b_row, b_column, o_k, m_k, i_g, n_columns, row_bytes, p_s_codes, p_s_scales,
                BITS, IEEE, TAIL,
            )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _apply_gated_kernel(
    p_y, p_index, p_seed, p_codes, p_scales, p_s_codes, p_s_scales, p_da, p_db,
    n_rows, n_tiles, n_columns, stride, row_bytes,
    BITS: tl.constexpr, HAS_INDEX: tl.constexpr, HAS_P: tl.constexpr, HAS_S: tl.constexpr, HALF: tl.constexpr,
    IEEE: tl.constexpr, TAIL: tl.constexpr, B_K: tl.constexpr,
):  # fmt: skip
    """n_tiles tiles of B_K rows and one group.

    p_y: (N, C), rows ``stride`` apart. p_index, p_seed: see _pack_gated_kernel. p_da, p_db: (N, C), contiguous. The
    others: see load_packed.
    """
    i_g, o_j, first = program_place(n_columns, n_tiles, B_K)
    if HAS_P:
        b_rotation_p = rotation(tl.load(p_seed), HALF, True)
    if HAS_S:
        b_rotation_s = rotation(tl.load(p_seed + 1), HALF, True)
    for i_t in range(n_tiles):
        begin = first + i_t * B_K
        o_k = begin + tl.arange(0, B_K)
        m_k = o_k < n_rows
        m_z = m_k[:, None] & (o_j < n_columns)[None, :] if TAIL else m_k[:, None]
        o_row = tl.load(p_index + o_k, mask=m_k, other=0) if HAS_INDEX else o_k
        o_out = o_row[:, None] * n_columns + o_j[None, :]
        b_y = tl.load(p_y + o_row[:, None] * stride + o_j[None, :], mask=m_z, other=0.0).to(tl.float32)
        if HAS_P:
            b_row, b_column = tile_words(tl.load(p_seed), begin, i_g, B_K)
            b_p, _ = load_packed(
                p_codes, p_scales, b_rotation_p, b_row, b_column, o_k, m_k, i_g, n_columns, row_bytes, BITS, IEEE, TAIL
            )
            tl.store(p_da + o_out, (b_y * b_p).to(p_da.dtype.element_ty), mask=m_z)
        if HAS_S:
            b_row, b_column = tile_words(tl.load(p_seed + 1), begin, i_g, B_K)
            b_s, _ = load_packed(
                p_s_codes, p_s_scales, b_rotation_s, b_row, b_column, o_k, m_k, i_g, n_columns, row_bytes,
                BITS, IEEE, TAIL,
            )  # fmt: skip
            tl.store(p_db + o_out, (b_y * b_s).to(p_db.dtype.element_ty), mask=m_z)


def _half(dtype: torch.dtype) -> tl.dtype:
    """What products are multiplied in: they may be larger than float16 holds, where their factors are in half types."""
    return product_type(dtype if dtype == torch.float32 else torch.bfloat16)


def _empty(
    rows: int, columns: int, bits: int, wanted: tuple[bool, bool], like: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    return [empty_sketch(rows, columns, bits, like) if needed else None for needed in wanted]


def pack_gated(
    a: torch.Tensor,
    b: torch.Tensor,
    seeds: Seed,
    activation: str,
    bits: int,
    wanted: tuple[bool, bool] = (True, True),
    index: torch.Tensor | None = None,
    out: list[tuple[torch.Tensor, torch.Tensor] | None] | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """Pack p = b · act'(a) and s = act(a), without bias.

    Args:
        a: float16, bfloat16 or float32, shape (N, C), any row stride.
        b: The same.
        seeds: int64, shape (2,), on the device of ``a``: of p and of s; or to be written there, see ``given``.
        activation: "gelu", "gelu_tanh", "silu" or "relu".
        bits: 8, 4 or 2.
        wanted: Whether p and s are needed.
        index: Rows to store, int64, shape (n,); None for all.
        out: The result is written into them, contiguous; None makes them.

    Returns:
        For p and for s: codes, uint8, shape (n, ⌈C·bits/8⌉), and scales, uint8, shape (n, ⌈C/64⌉); or None.
    """
    a, b = (matrix if matrix.stride(1) == 1 else matrix.contiguous() for matrix in (a, b))
    rows, columns = a.shape[0] if index is None else index.shape[0], a.shape[1]
    packed = _empty(rows, columns, bits, wanted, a) if out is None else out
    known = given(seeds, rows > 0 and columns > 0, 2)
    if rows and columns:
        size = rows_for(a, a.dtype, True)
        taken, grid = tiles(rows, cdiv(columns, GROUP), size)
        launch(
            _pack_gated_kernel, grid,
            a, b, index, *known, *(packed[0] or (None, None)), *(packed[1] or (None, None)), rows, taken,
            columns, a.stride(0), b.stride(0), code_bytes(columns, bits),
            ACTIVATION=_ACTIVATIONS.index(activation), BITS=bits, HAS_INDEX=index is not None, HAS_P=wanted[0],
            HAS_S=wanted[1], HALF=_half(a.dtype), IEEE=is_ieee(), TAIL=columns % GROUP != 0, B_K=size,
        )  # fmt: skip
    return packed


def gate_and_pack(
    a: torch.Tensor,
    b: torch.Tensor,
    seeds: Seed,
    activation: str,
    bits: int,
    wanted: tuple[bool, bool] = (True, True),
    index: torch.Tensor | None = None,
    saved: list[tuple[torch.Tensor, torch.Tensor] | None] | None = None,
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor] | None]]:
    """Compute act(a) · b, and pack what ``pack_gated`` does, in one pass.

    Args:
        a: float16, bfloat16 or float32, shape (N, C), any row stride.
        b: The same.
        seeds: As for ``pack_gated``, as the following ones.
        activation: "gelu", "gelu_tanh", "silu" or "relu".
        bits: 8, 4 or 2.
        wanted: Whether p and s are needed.
        index: Rows to store, int64, shape (n,); None for all.
        saved: The result of ``pack_gated`` is written into them, contiguous; None makes them.

    Returns:
        act(a), rounded to the dtype of ``a``, times b, of all rows, shape (N, C); and the result of ``pack_gated``.
    """
    a, b = (matrix if matrix.stride(1) == 1 else matrix.contiguous() for matrix in (a, b))
    (rows, columns), stored = a.shape, a.shape[0] if index is None else index.shape[0]
    packed = _empty(stored, columns, bits, wanted, a) if saved is None else saved
    out = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    known = given(seeds, out.numel() > 0, 2)
    if out.numel():
        size = rows_for(a, a.dtype, True)
        taken, grid = tiles(rows, cdiv(columns, GROUP), size)
        launch(
            _gate_kernel, grid,
            a, b, places(index, rows), *known, out, *(packed[0] or (None, None)), *(packed[1] or (None, None)),
            rows, taken, columns, a.stride(0), b.stride(0), code_bytes(columns, bits),
            ACTIVATION=_ACTIVATIONS.index(activation), BITS=bits, HAS_PLACE=index is not None,
            HAS_P=wanted[0], HAS_S=wanted[1], HALF=_half(a.dtype), IEEE=is_ieee(), TAIL=columns % GROUP != 0, B_K=size,
        )  # fmt: skip
    return out, packed


def apply_gated(
    y: torch.Tensor,
    seeds: torch.Tensor,
    packed: list[tuple[torch.Tensor, torch.Tensor] | None],
    bits: int,
    index: torch.Tensor | None = None,
) -> list[torch.Tensor | None]:
    """Multiply a gradient by p and by s.

    Args:
        y: float16, bfloat16 or float32, shape (N, C), any row stride.
        seeds: The seeds they were packed with.
        packed: Result of ``pack_gated``.
        bits: Its width.
        index: The rows that are stored, int64, shape (n,); None for all. All others get zeros.

    Returns:
        y · p and y · s, shape (N, C), dtype of ``y``; or None.
    """
    y = y if y.stride(1) == 1 else y.contiguous()
    rows, columns = y.shape[0] if index is None else index.shape[0], y.shape[1]
    make = torch.empty if index is None else torch.zeros
    found = [None if one is None else make(y.shape, dtype=y.dtype, device=y.device) for one in packed]
    if rows and columns:
        size = rows_for(y, y.dtype, True)
        taken, grid = tiles(rows, cdiv(columns, GROUP), size)
        launch(
            _apply_gated_kernel, grid,
            y, index, seeds, *(packed[0] or (None, None)), *(packed[1] or (None, None)), *found, rows, taken,
            columns, y.stride(0), code_bytes(columns, bits), BITS=bits, HAS_INDEX=index is not None,
            HAS_P=packed[0] is not None, HAS_S=packed[1] is not None,
            HALF=small_type(y.dtype), IEEE=is_ieee(),
            TAIL=columns % GROUP != 0, B_K=size,
        )  # fmt: skip
    return found
