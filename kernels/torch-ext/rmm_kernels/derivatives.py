"""pack_derivative and apply_derivative: g'(x) of pointwise functions in 8, 4, 2 or 1 bits, in groups of 64 columns."""

import torch
import triton
import triton.language as tl

from .draws import words
from .launch import on_device

_STREAM = tl.constexpr(3)
_FAR = tl.constexpr(1024.0)  # beyond it every derivative has reached its limit; the formulas need a finite x


@triton.jit
def sigmoid(b_x):
    """By the exponential of a negative number, which cannot overflow."""
    b_e = tl.exp(-tl.abs(b_x))
    return tl.where(b_x < 0, b_e, 1.0) / (1.0 + b_e)


@triton.jit
def _tanh(b_x):
    return 2.0 * sigmoid(2.0 * b_x) - 1.0


@triton.jit
def _silu_derivative(b_x):
    b_s = sigmoid(b_x)
    return b_s * (1.0 + b_x * (1.0 - b_s))


@triton.jit
def derivative(b_x, parameter, FUNCTION: tl.constexpr):
    """g'(x), float32, any shape.

    b_x: float32; NaN counts as −∞. parameter: α of "elu", else not read.
    """
    b_x = tl.where(b_x > -_FAR, tl.minimum(b_x, _FAR), -_FAR)
    if FUNCTION == "gelu":
        return 0.5 * (1.0 + tl.erf(b_x * 0.7071067811865476)) + b_x * tl.exp(-0.5 * b_x * b_x) * 0.3989422804014327
    elif FUNCTION == "gelu_tanh":
        b_t = _tanh(0.7978845608028654 * (b_x + 0.044715 * b_x * b_x * b_x))
        b_inner = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * b_x * b_x)
        return 0.5 * (1.0 + b_t) + 0.5 * b_x * (1.0 - b_t * b_t) * b_inner
    elif FUNCTION == "silu":
        return _silu_derivative(b_x)
    elif FUNCTION == "quick_gelu":
        return _silu_derivative(1.702 * b_x)
    elif FUNCTION == "mish":
        b_t = _tanh(tl.maximum(b_x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(b_x))))
        return b_t + b_x * (1.0 - b_t * b_t) * sigmoid(b_x)
    elif FUNCTION == "hardswish":
        return tl.where(b_x <= -3.0, 0.0, tl.where(b_x >= 3.0, 1.0, b_x / 3.0 + 0.5))
    elif FUNCTION == "sigmoid":
        b_s = sigmoid(b_x)
        return b_s * (1.0 - b_s)
    elif FUNCTION == "tanh":
        b_t = _tanh(b_x)
        return 1.0 - b_t * b_t
    else:
        tl.static_assert(FUNCTION == "elu")
        return tl.where(b_x > 0, 1.0, parameter * tl.exp(tl.minimum(b_x, 0.0)))


@triton.jit
def _dither(b_row, b_column):
    """u, float32, of the words of rows and columns that have been broadcast against each other."""
    return ((b_row >> 9) ^ (b_column >> 9)).to(tl.float32) * 1.1920928955078125e-07


@triton.jit
def code_of(b_x, b_row, seed, o_c, m_c, parameter, low, inverse, FUNCTION: tl.constexpr):
    """Codes of a tile, int32 (B_N, B_B).

    b_x: float32 (B_N, B_B). b_row: uint32 (B_N,), words of its rows. seed: int64 scalar. o_c: int32 (B_B,), columns;
    m_c: those that exist. parameter, low, inverse: see _pack_derivative_kernel. Exact functions read b_x alone.
    """
    if FUNCTION == "relu":
        return tl.where(b_x <= 0, 0, 1)
    elif FUNCTION == "leaky_relu":
        return tl.where(b_x > 0, 1, 0)
    else:
        _, b_column, _, _ = words(seed, tl.where(m_c, o_c, 0).to(tl.int64), _STREAM)
        b_steps = tl.maximum((derivative(b_x, parameter, FUNCTION) - low) * inverse, 0.0)
        return tl.floor(b_steps + _dither(b_row[:, None], b_column[None, :])).to(tl.int32)


@triton.jit
def row_words(p_seed, o_n, FUNCTION: tl.constexpr):
    """The seed, int64 scalar, and the words of rows of codes, uint32 (B_N,); anything for exact functions."""
    if FUNCTION == "relu" or FUNCTION == "leaky_relu":
        return 0, o_n
    else:
        seed = tl.load(p_seed)
        b_row, _, _, _ = words(seed, o_n, _STREAM)
        return seed, b_row


@triton.jit
def _pack_derivative_kernel(
    p_x, p_index, p_seed, p_codes, n_rows, n_columns, stride, parameter, low, inverse,
    FUNCTION: tl.constexpr, BITS: tl.constexpr, HAS_INDEX: tl.constexpr, B_N: tl.constexpr, B_B: tl.constexpr,
):  # fmt: skip
    """B_N rows and B_B bytes of each.

    p_x: (N, C), rows ``stride`` apart. p_index: int64 (n,). p_seed: int64 (1,). p_codes: uint8 (n, ⌈C·BITS/8⌉).
    parameter: α or slope. low: of the range. inverse: 1 / step.
    """
    n_bytes = (n_columns * BITS + 7) // 8
    o_n = tl.program_id(0).to(tl.int64) * B_N + tl.arange(0, B_N)
    o_b = tl.program_id(1) * B_B + tl.arange(0, B_B)  # 32 bits: of columns alone
    m_n = o_n < n_rows
    o_row = tl.load(p_index + o_n, mask=m_n, other=0) if HAS_INDEX else o_n
    o_g = o_b // (8 * BITS)
    o_i = o_b % (8 * BITS)
    b_size = tl.minimum(n_columns - o_g * 64, 64)
    h = (b_size * BITS + 7) // 8
    seed, b_row = row_words(p_seed, o_n, FUNCTION)
    b_bytes = tl.zeros((B_N, B_B), dtype=tl.int32)
    for j in tl.static_range(8 // BITS):
        o_j = j * h + o_i
        o_c = o_g * 64 + o_j
        m_c = (o_i < h) & (o_j < b_size)
        m_x = m_n[:, None] & m_c[None, :]
        b_x = tl.load(p_x + o_row[:, None] * stride + o_c[None, :], mask=m_x, other=0.0).to(tl.float32)
        b_code = code_of(b_x, b_row, seed, o_c, m_c, parameter, low, inverse, FUNCTION)
        b_bytes += tl.where(m_x, b_code, 0) << (j * BITS)
    m_b = m_n[:, None] & (o_b < n_bytes)[None, :]
    tl.store(p_codes + o_n[:, None] * n_bytes + o_b[None, :], b_bytes.to(tl.uint8), mask=m_b)


@triton.jit
def _apply_derivative_kernel(
    p_y, p_index, p_seed, p_codes, p_out, n_rows, n_columns, stride, parameter, low, step,
    FUNCTION: tl.constexpr, BITS: tl.constexpr, HAS_INDEX: tl.constexpr, B_N: tl.constexpr, B_C: tl.constexpr,
):  # fmt: skip
    """B_N rows and B_C of their columns.

    p_y: (N, C), rows ``stride`` apart. p_out: (N, C), contiguous. step: of the codes. The others: as for packing.
    """
    n_bytes = (n_columns * BITS + 7) // 8
    o_n = tl.program_id(0).to(tl.int64) * B_N + tl.arange(0, B_N)
    o_c = tl.program_id(1) * B_C + tl.arange(0, B_C)
    m_n = o_n < n_rows
    m_c = o_c < n_columns
    m_y = m_n[:, None] & m_c[None, :]
    o_row = tl.load(p_index + o_n, mask=m_n, other=0) if HAS_INDEX else o_n
    o_g = o_c // 64
    h = tl.maximum((tl.minimum(n_columns - o_g * 64, 64) * BITS + 7) // 8, 1)
    o_b = o_g * (8 * BITS) + o_c % 64 % h
    b_bytes = tl.load(p_codes + o_n[:, None] * n_bytes + o_b[None, :], mask=m_y, other=0).to(tl.int32)
    b_code = (b_bytes >> (o_c % 64 // h * BITS)[None, :]) & (2**BITS - 1)
    b_y = tl.load(p_y + o_row[:, None] * stride + o_c[None, :], mask=m_y, other=0.0).to(tl.float32)
    if FUNCTION == "relu":
        b_out = tl.where(b_code != 0, b_y, 0.0)
    elif FUNCTION == "leaky_relu":
        b_out = tl.where(b_code != 0, b_y, b_y * parameter)
    else:
        seed = tl.load(p_seed)
        b_row, _, _, _ = words(seed, o_n, _STREAM)
        _, b_column, _, _ = words(seed, o_c.to(tl.int64), _STREAM)
        b_u = _dither(b_row[:, None], b_column[None, :])
        b_out = b_y * (low + step * (b_code.to(tl.float32) - (b_u - 0.5)))
    tl.store(p_out + o_row[:, None] * n_columns + o_c[None, :], b_out.to(p_out.dtype.element_ty), mask=m_y)


def tile_bytes(bits: int) -> int:
    """Bytes of a row that a program makes: those of 128 columns, 64 at most."""
    return min(64, 16 * bits)


def pack_derivative(
    x: torch.Tensor,
    codes: torch.Tensor,
    name: str,
    parameters: tuple[float, ...],
    line: tuple[float, float],
    bits: int,
    seed: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
) -> None:
    """Round the derivative of a pointwise function to ``bits`` per element, in one pass over ``x``.

    Args:
        x: float16, bfloat16 or float32, shape (N, C), any row stride.
        codes: Written to; uint8, shape (n, ⌈C·bits/8⌉), contiguous.
        name: "gelu", "gelu_tanh", "silu", "quick_gelu", "mish", "hardswish", "sigmoid", "tanh", "elu", or "relu" and
            "leaky_relu", which are exact in one bit.
        parameters: (α,) of "elu", (slope,) of "leaky_relu"; () for the others.
        line: Low end of the derivative's range, and the step from one code to the next.
        bits: 8, 4, 2 or 1.
        seed: int64, shape (1,); None where one bit is exact.
        index: Rows to store, int64, shape (n,); None for all.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    (low, step), tile = line, tile_bytes(bits)
    if codes.numel():
        grid = (triton.cdiv(codes.shape[0], 16), triton.cdiv(codes.shape[1], tile))
        with on_device(x):
            _pack_derivative_kernel[grid](
                x, index, seed, codes, codes.shape[0], x.shape[1], x.stride(0), float((*parameters, 0.0)[0]), low,
                1.0 / step, FUNCTION=name, BITS=bits, HAS_INDEX=index is not None, B_N=16, B_B=tile, num_warps=4,
            )  # fmt: skip


def apply_derivative(
    y: torch.Tensor,
    codes: torch.Tensor,
    name: str,
    parameters: tuple[float, ...],
    line: tuple[float, float],
    bits: int,
    seed: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply a gradient by stored derivatives, in one pass.

    Args:
        y: float16, bfloat16 or float32, shape (N, C), any row stride.
        codes: What ``pack_derivative`` wrote with the arguments that follow.
        name: The function.
        parameters: Its parameters.
        line: Low end of the range, and the step.
        bits: 8, 4, 2 or 1.
        seed: int64, shape (1,), or None.
        index: The rows that are stored, int64, shape (n,); None for all.

    Returns:
        Shape (N, C), dtype of ``y``; rows that are not stored are zero.
    """
    y = y if y.stride(1) == 1 else y.contiguous()
    out = (torch.empty if index is None else torch.zeros)(y.shape, dtype=y.dtype, device=y.device)
    rows, columns = codes.shape[0], y.shape[1]
    if codes.numel():
        grid = (triton.cdiv(rows, 16), triton.cdiv(columns, 128))
        with on_device(y):
            _apply_derivative_kernel[grid](
                y, index, seed, codes, out, rows, columns, y.stride(0), float((*parameters, 0.0)[0]), *line,
                FUNCTION=name, BITS=bits, HAS_INDEX=index is not None, B_N=16, B_C=128, num_warps=4,
            )  # fmt: skip
    return out
