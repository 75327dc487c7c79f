"""pack_mask and apply_mask: which elements dropout kept, in one bit each."""

import torch
import triton
import triton.language as tl

from .launch import cdiv, launch


@triton.jit(do_not_specialize=["n_rows"])
def _pack_mask_kernel(
    p_m, p_index, p_bits, n_rows, n_columns, stride, HAS_INDEX: tl.constexpr, B_N: tl.constexpr, B_B: tl.constexpr
):  # fmt: skip
    """B_N rows and B_B bytes of each.

    p_m: (N, C), rows ``stride`` apart. p_index: int64 (n,). p_bits: uint8 (n, ⌈C/8⌉).
    """
    n_bytes = tl.cdiv(n_columns, 8)
    n_parts = tl.cdiv(n_bytes, B_B)
    o_n = (tl.program_id(0) // n_parts).to(tl.int64) * B_N + tl.arange(0, B_N)
    i_b = (tl.program_id(0) % n_parts).to(tl.int64) * B_B
    o_c = i_b * 8 + tl.arange(0, 8 * B_B)
    m_n = o_n < n_rows
    o_row = tl.load(p_index + o_n, mask=m_n, other=0) if HAS_INDEX else o_n
    m_m = m_n[:, None] & (o_c < n_columns)[None, :]
    b_m = tl.load(p_m + o_row[:, None] * stride + o_c[None, :], mask=m_m, other=0)
    b_kept = (b_m != 0).to(tl.int32) << (o_c % 8).to(tl.int32)[None, :]
    b_bits = tl.sum(tl.reshape(b_kept, (B_N, B_B, 8)), axis=2)
    o_b = i_b + tl.arange(0, B_B)
    m_b = m_n[:, None] & (o_b < n_bytes)[None, :]
    tl.store(p_bits + o_n[:, None] * n_bytes + o_b[None, :], b_bits.to(tl.uint8), mask=m_b)


@triton.jit(do_not_specialize=["n_rows"])
def _apply_mask_kernel(
    p_y, p_bits, p_index, p_out, n_rows, n_columns, stride, scale,
    HAS_INDEX: tl.constexpr, B_N: tl.constexpr, B_C: tl.constexpr,
):  # fmt: skip
    """B_N rows and B_C of their columns.

    p_y: (N, C), rows ``stride`` apart. p_bits: uint8 (n, ⌈C/8⌉). p_index: int64 (n,). p_out: (N, C), contiguous.
    """
    n_parts = tl.cdiv(n_columns, B_C)
    o_n = (tl.program_id(0) // n_parts).to(tl.int64) * B_N + tl.arange(0, B_N)
    o_c = (tl.program_id(0) % n_parts).to(tl.int64) * B_C + tl.arange(0, B_C)
    m_n = o_n < n_rows
    m_y = m_n[:, None] & (o_c < n_columns)[None, :]
    o_row = tl.load(p_index + o_n, mask=m_n, other=0) if HAS_INDEX else o_n
    b_bytes = tl.load(p_bits + o_n[:, None] * tl.cdiv(n_columns, 8) + (o_c // 8)[None, :], mask=m_y, other=0)
    b_kept = (b_bytes.to(tl.int32) >> (o_c % 8).to(tl.int32)[None, :]) & 1
    b_y = tl.load(p_y + o_row[:, None] * stride + o_c[None, :], mask=m_y, other=0.0).to(tl.float32)
    b_out = b_y * tl.where(b_kept != 0, scale, 0.0)
    tl.store(p_out + o_row[:, None] * n_columns + o_c[None, :], b_out.to(p_out.dtype.element_ty), mask=m_y)


def pack_mask(mask: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
    """Store which elements are not zero.

    Args:
        mask: bool, uint8, float16, bfloat16 or float32, shape (N, C), any row stride.
        index: Rows to store, int64, shape (n,); None for all.

    Returns:
        uint8, shape (n, ⌈C/8⌉): bit j of byte i of a row says whether its element 8·i + j is not zero.
    """
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    mask = mask if mask.stride(1) == 1 else mask.contiguous()
    rows, columns = mask.shape[0] if index is None else index.shape[0], mask.shape[1]
    bits = torch.empty(rows, cdiv(columns, 8), dtype=torch.uint8, device=mask.device)
    if bits.numel():
        grid = (cdiv(rows, 8) * cdiv(columns, 512),)
        launch(
            _pack_mask_kernel, grid,
            mask, index, bits, rows, columns, mask.stride(0),
            HAS_INDEX=index is not None, B_N=8, B_B=64,
        )  # fmt: skip
    return bits


def apply_mask(y: torch.Tensor, bits: torch.Tensor, scale: float, index: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply the stored elements by a number, and set all others to zero.

    Args:
        y: float16, bfloat16 or float32, shape (N, C), any row stride.
        bits: Result of ``pack_mask``.
        scale: The number.
        index: The rows that are stored, int64, shape (n,); None for all.

    Returns:
        Shape (N, C), dtype of ``y``.
    """
    y = y if y.stride(1) == 1 else y.contiguous()
    rows, columns = bits.shape[0], y.shape[1]
    out = (torch.empty if index is None else torch.zeros)(y.shape, dtype=y.dtype, device=y.device)
    if rows and columns:
        grid = (cdiv(rows, 16) * cdiv(columns, 128),)
        launch(
            _apply_mask_kernel, grid,
            y, bits, index, out, rows, columns, y.stride(0), scale,
            HAS_INDEX=index is not None, B_N=16, B_C=128,
        )  # fmt: skip
    return out
