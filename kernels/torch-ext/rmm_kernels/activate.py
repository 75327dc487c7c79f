"""activate_and_pack and square_and_pack: a pointwise function and what its backward pass needs, in one pass.

The codes are those of ``pack_derivative`` and ``pack`` for the same seed. The function is computed in float32 and
rounded once to the dtype of its input. With u = 2⁻²⁴, its error before that is below 16 u · max(|x|, |g(x)|): PyTorch's
own formulas have errors of this kind too, as 1 + erf(x / √2) of GELU cancels for x < 0. Where g is linear near 0 (tanh,
ELU), it is below 16 u · |g(x)|.
"""

import torch
import triton
import triton.language as tl

from .derivatives import code_of, row_words, sigmoid, tile_bytes
from .launch import on_device, places, precision
from .packing import GROUP, empty_sketch, store_packed

_FAR = tl.constexpr(1024.0)  # as for derivatives, which share the exponentials


@triton.jit
def _tanh(b_x):
    """By a polynomial where the exponential would lose digits."""
    b_a = tl.abs(b_x)
    b_z = b_x * b_x
    b_near = (((-5.70498872745e-3 * b_z + 2.06390887954e-2) * b_z - 5.37397155531e-2) * b_z + 1.33314422036e-1) * b_z
    b_near = (b_near - 3.33332819422e-1) * b_z * b_x + b_x
    b_e = tl.exp(-2.0 * b_a)
    b_far = (1.0 - b_e) / (1.0 + b_e)
    return tl.where(b_a < 0.625, b_near, tl.where(b_x < 0, -b_far, b_far))


@triton.jit
def value(b_x, parameter, FUNCTION: tl.constexpr):
    """g(x), float32, any shape.

    b_x: float32; of ±∞ and NaN the results are PyTorch's. parameter: α of "elu", slope of "leaky_relu".
    """
    b_c = tl.where(b_x > -_FAR, tl.minimum(b_x, _FAR), -_FAR)
    if FUNCTION == "gelu":
        return b_x * (0.5 * (1.0 + tl.erf(b_c * 0.7071067811865476)))
    elif FUNCTION == "gelu_tanh":
        return b_x * sigmoid(2.0 * (0.7978845608028654 * (b_c + 0.044715 * b_c * b_c * b_c)))
    elif FUNCTION == "silu":
        return b_x * sigmoid(b_c)
    elif FUNCTION == "quick_gelu":
        return b_x * sigmoid(1.702 * b_c)
    elif FUNCTION == "mish":  # tanh(log(1 + eˣ)) = (e²ˣ + 2eˣ) / (e²ˣ + 2eˣ + 2), by the exponential of −|x|
        b_n = tl.exp(-tl.abs(b_c))
        b_top = tl.where(b_c < 0, b_n * (b_n + 2.0), 1.0 + 2.0 * b_n)
        return b_x * (b_top / (b_top + tl.where(b_c < 0, 2.0, 2.0 * b_n * b_n)))
    elif FUNCTION == "hardswish":
        return b_x * (tl.minimum(tl.maximum(b_x + 3.0, 0.0), 6.0) / 6.0)
    elif FUNCTION == "sigmoid":
        return sigmoid(b_x)
    elif FUNCTION == "tanh":
        return _tanh(b_x)
    elif FUNCTION == "elu":  # eˣ − 1 = 2t / (1 − t) with t = tanh(x / 2), which cancels nothing for x < 0
        b_t = _tanh(0.5 * b_x)
        return tl.where(b_x > 0, b_x, parameter * (2.0 * b_t / (1.0 - tl.where(b_x > 0, 0.0, b_t))))
    elif FUNCTION == "relu":
        return tl.where(b_x <= 0, 0.0, b_x)
    else:
        tl.static_assert(FUNCTION == "leaky_relu")
        return tl.where(b_x > 0, b_x, b_x * parameter)


@triton.jit
def _activate_kernel(
    p_x, p_place, p_seed, p_out, p_codes, n_rows, n_columns, stride, parameter, low, inverse,
    FUNCTION: tl.constexpr, BITS: tl.constexpr, HAS_PLACE: tl.constexpr, B_N: tl.constexpr, B_B: tl.constexpr,
):  # fmt: skip
    """B_N rows and the columns whose codes are in B_B bytes of each.

    p_x: (N, C), rows ``stride`` apart. p_place: int64 (N,), the row of codes, or −1. p_seed: int64 (1,). p_out: (N, C),
    contiguous. p_codes: uint8 (n, ⌈C·BITS/8⌉). parameter, low, inverse: see _pack_derivative_kernel.
    """
    n_bytes = (n_columns * BITS + 7) // 8
    o_n = tl.program_id(0).to(tl.int64) * B_N + tl.arange(0, B_N)
    o_b = tl.program_id(1) * B_B + tl.arange(0, B_B)  # 32 bits: of columns alone
    m_n = o_n < n_rows
    o_k = tl.load(p_place + o_n, mask=m_n, other=-1) if HAS_PLACE else o_n
    m_k = (o_k >= 0) & m_n
    o_k = tl.maximum(o_k, 0)
    o_g = o_b // (8 * BITS)
    o_i = o_b % (8 * BITS)
    b_size = tl.minimum(n_columns - o_g * 64, 64)
    h = (b_size * BITS + 7) // 8
    seed, b_row = row_words(p_seed, o_k, FUNCTION)
    b_bytes = tl.zeros((B_N, B_B), dtype=tl.int32)
    for j in tl.static_range(8 // BITS):
        o_j = j * h + o_i
        o_c = o_g * 64 + o_j
        m_c = (o_i < h) & (o_j < b_size)
        m_x = m_n[:, None] & m_c[None, :]
        b_x = tl.load(p_x + o_n[:, None] * stride + o_c[None, :], mask=m_x, other=0.0).to(tl.float32)
        b_out = value(b_x, parameter, FUNCTION).to(p_out.dtype.element_ty)
        tl.store(p_out + o_n[:, None] * n_columns + o_c[None, :], b_out, mask=m_x)
        b_code = code_of(b_x, b_row, seed, o_c, m_c, parameter, low, inverse, FUNCTION)
        b_bytes += tl.where(m_x, b_code, 0) << (j * BITS)
    m_b = m_k[:, None] & (o_b < n_bytes)[None, :]
    tl.store(p_codes + o_k[:, None] * n_bytes + o_b[None, :], b_bytes.to(tl.uint8), mask=m_b)


@triton.jit
def _square_kernel(
    p_x, p_place, p_seed, p_out, p_codes, p_scales, n_rows, n_columns, stride,
    BITS: tl.constexpr, HAS_PLACE: tl.constexpr, PRECISION: tl.constexpr, B_K: tl.constexpr,
):  # fmt: skip
    """One tile of B_K rows and one group.

    p_x, p_place, p_seed, p_out: see _activate_kernel. p_codes, p_scales: see store_packed.
    """
    i_g = tl.program_id(1).to(tl.int64)
    o_n = tl.program_id(0).to(tl.int64) * B_K + tl.arange(0, B_K)
    o_j = i_g * 64 + tl.arange(0, 64)
    m_n = o_n < n_rows
    m_x = m_n[:, None] & (o_j < n_columns)[None, :]
    o_k = tl.load(p_place + o_n, mask=m_n, other=-1) if HAS_PLACE else o_n
    b_x = tl.load(p_x + o_n[:, None] * stride + o_j[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_x = tl.where(b_x <= 0, 0.0, b_x)
    tl.store(p_out + o_n[:, None] * n_columns + o_j[None, :], (b_x * b_x).to(p_out.dtype.element_ty), mask=m_x)
    m_k = (o_k >= 0) & m_n
    store_packed(b_x, tl.load(p_seed), tl.maximum(o_k, 0), m_k, i_g, n_columns, p_codes, p_scales, BITS, PRECISION)


def activate_and_pack(
    x: torch.Tensor,
    codes: torch.Tensor,
    name: str,
    parameters: tuple[float, ...],
    line: tuple[float, float],
    bits: int,
    seed: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply a pointwise function to ``x``, and round its derivative as ``pack_derivative`` does, in one pass.

    Args:
        x: float16, bfloat16 or float32, shape (N, C), any row stride.
        codes: Written to; uint8, shape (n, ⌈C·bits/8⌉), contiguous.
        name: As for ``pack_derivative``, as the following ones.
        parameters: (α,) of "elu", (slope,) of "leaky_relu"; () for the others.
        line: Low end of the derivative's range, and the step from one code to the next.
        bits: 8, 4, 2 or 1.
        seed: int64, shape (1,); None where one bit is exact.
        index: Rows whose codes are stored, int64, shape (n,); None for all.

    Returns:
        g(x) of all rows, shape (N, C), dtype of ``x``, contiguous.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (low, step), tile = line, tile_bytes(bits)
    if out.numel():
        grid = (triton.cdiv(x.shape[0], 16), triton.cdiv(codes.shape[1], tile))
        with on_device(x):
            _activate_kernel[grid](
                x, places(index, x.shape[0]), seed, out, codes, x.shape[0], x.shape[1], x.stride(0),
                float((*parameters, 0.0)[0]), low, 1.0 / step, FUNCTION=name, BITS=bits, HAS_PLACE=index is not None,
                B_N=16, B_B=tile, num_warps=4,
            )  # fmt: skip
    return out


def square_and_pack(
    x: torch.Tensor, bits: int, seed: torch.Tensor, index: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute relu(x)², and pack relu(x) as ``pack`` does, in one pass.

    Args:
        x: float16, bfloat16 or float32, shape (N, C), any row stride.
        bits: 8, 4 or 2.
        seed: int64, shape (1,), on the device of ``x``.
        index: Rows to pack, int64, shape (n,); None for all.

    Returns:
        relu(x)² of all rows, shape (N, C), dtype of ``x``; codes, uint8, shape (n, ⌈C·bits/8⌉), and scales, uint8,
        shape (n, ⌈C/64⌉).
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    codes, scales = empty_sketch(rows if index is None else index.shape[0], columns, bits, x)
    if out.numel():
        grid = (triton.cdiv(rows, 32), triton.cdiv(columns, GROUP))
        with on_device(x):
            _square_kernel[grid](
                x, places(index, rows), seed, out, codes, scales, rows, columns, x.stride(0), BITS=bits,
                HAS_PLACE=index is not None, PRECISION=precision(), B_K=32, num_warps=4,
            )  # fmt: skip
    return out, codes, scales
