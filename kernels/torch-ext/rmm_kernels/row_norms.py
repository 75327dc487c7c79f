"""row_norms: ‖xᵢ‖ of every row."""

import torch
import triton
import triton.language as tl

from .launch import cdiv, launch


@triton.jit(do_not_specialize=["n_tokens"])
def _row_norms_kernel(p_m, p_norms, n_tokens, n_columns, stride, B_N: tl.constexpr, B_D: tl.constexpr):
    """B_N rows.

    p_m: (N, D), rows ``stride`` apart. p_norms: float32 (N,).
    """
    o_n = tl.program_id(0).to(tl.int64) * B_N + tl.arange(0, B_N)
    m_n = o_n < n_tokens
    b_sum = tl.zeros((B_N,), dtype=tl.float32)
    for i_d in range(0, n_columns, B_D):
        o_d = i_d + tl.arange(0, B_D)
        m_m = m_n[:, None] & (o_d < n_columns)[None, :]
        b_m = tl.load(p_m + o_n[:, None] * stride + o_d[None, :], mask=m_m, other=0.0).to(tl.float32)
        b_sum += tl.sum(b_m * b_m, axis=1)
    tl.store(p_norms + o_n, tl.sqrt(b_sum), mask=m_n)


def row_norms(matrix: torch.Tensor) -> torch.Tensor:
    """Return the Euclidean norm of every row.

    Args:
        matrix: float16, bfloat16 or float32, shape (N, D), any row stride.

    Returns:
        float32, shape (N,).
    """
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    tokens, columns = matrix.shape
    norms = torch.empty(tokens, dtype=torch.float32, device=matrix.device)
    if tokens:
        grid = (cdiv(tokens, 16),)
        launch(_row_norms_kernel, grid, matrix, norms, tokens, columns, matrix.stride(0), B_N=16, B_D=256)
    return norms
