"""pack_derivative and apply_derivative: g'(x) of pointwise functions in 8, 4, 2 or 1 bits, in groups of 64 columns."""

import torch
import triton
import triton.language as tl

from .groups import GROUP, ROWS, dither, load_codes, program_place, store_codes, tile_words
from .launch import cdiv, launch
from .packing import tiles

NAN = tl.constexpr(-(2**63))  # in place of a seed: x had a NaN
_FAR = tl.constexpr(1024.0)  # beyond it every derivative has reached its limit; the formulas need a finite x


@triton.jit
def sigmoid(b_x):
    """By the exponential of a negative number, which cannot overflow."""
    b_e = tl.exp(-tl.abs(b_x))
    return tl.where(b_x < 0, b_e, 1.0) / (1.0 + b_e)


@triton.jit
def normal_cdf(b_x):
    """Φ(x), and exp(−x²/2) from which it is made, float32: its error is at most 7.5e-8.

    Source: Abramowitz and Stegun 1964, "Handbook of mathematical functions", 7.1.26.
    """
    b_t = 1.0 / (1.0 + 0.23164188 * tl.abs(b_x))
    b_e = tl.exp(-0.5 * b_x * b_x)
    b_sum = b_t * (0.127414796 + b_t * (-0.142248368 + b_t * (0.710706870 + b_t * (-0.726576013 + b_t * 0.530702714))))
    b_tail = b_sum * b_e
    return tl.where(b_x < 0, b_tail, 1.0 - b_tail), b_e


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
        b_phi, b_e = normal_cdf(b_x)
        return b_phi + b_x * b_e * 0.3989422804014327
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
def code_of(b_x, b_row, b_column, parameter, low, inverse, FUNCTION: tl.constexpr):
    """Codes of a tile, the low bits of int32 (B_K, 64).

    b_x: float32 (B_K, 64). b_row, b_column: see tile_words. parameter, low, inverse: see _pack_derivative_kernel. Exact
    functions read b_x alone.
    """
    if FUNCTION == "relu":
        return tl.where(b_x <= 0, 0, 1)
    elif FUNCTION == "leaky_relu":
        return tl.where(b_x > 0, 1, 0)
    elif FUNCTION == "hardtanh":
        return tl.where((b_x > parameter) & (b_x < low), 1, 0)
    else:
        b_steps = tl.maximum((derivative(b_x, parameter, FUNCTION) - low) * inverse, 0.0)
        # The sum is at least 1/2 and rounded to a whole number, by the last bit of 3 · 2²²: that of the code.
        return (b_steps + (dither(b_row, b_column, False) - 0.5) + 12582911.0).to(tl.int32, bitcast=True)


@triton.jit
def note_nan(b_x, m_k, p_seed):
    """Write NAN in place of the seed if a row that is stored has one; programs that read it later round otherwise."""
    b_largest = tl.max(b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # of a NaN, above the bits of ∞
    m_nan = m_k & (b_largest > 0x7F800000)
    tl.store(p_seed + tl.zeros(m_nan.shape, tl.int32), tl.full(m_nan.shape, NAN, tl.int64), mask=m_nan)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _pack_derivative_kernel(
    p_x, p_index, p_seed, p_codes, n_rows, n_tiles, n_columns, stride, row_bytes, parameter, low, inverse,
    FUNCTION: tl.constexpr, BITS: tl.constexpr, HAS_INDEX: tl.constexpr, TAIL: tl.constexpr, B_K: tl.constexpr,
):  # fmt: skip
    """n_tiles tiles of B_K rows and 64 columns.

    p_x: (N, C), rows ``stride`` apart. p_index: int64 (n,). p_seed: int64 (1,). p_codes: uint8 (n, row_bytes).
    parameter: α or slope. low: of the range. inverse: 1 / step.
    """
    i_g, o_j, first = program_place(n_columns, n_tiles, B_K)
    for i_t in range(n_tiles):
        begin = first + i_t * B_K
        o_k = begin + tl.arange(0, B_K)
        m_k = o_k < n_rows
        m_x = m_k[:, None] & (o_j < n_columns)[None, :] if TAIL else m_k[:, None]
        o_row = tl.load(p_index + o_k, mask=m_k, other=0) if HAS_INDEX else o_k
        b_x = tl.load(p_x + o_row[:, None] * stride + o_j[None, :], mask=m_x, other=0.0).to(tl.float32)
        if FUNCTION == "relu" or FUNCTION == "leaky_relu" or FUNCTION == "hardtanh":
            b_code = code_of(b_x, o_k, o_j, parameter, low, inverse, FUNCTION)
        else:
            b_row, b_column = tile_words(tl.load(p_seed), begin, i_g, B_K)
            b_code = code_of(b_x, b_row, b_column, parameter, low, inverse, FUNCTION)
            note_nan(b_x, m_k, p_seed)
        store_codes(b_code, o_k, m_k, i_g, n_columns, row_bytes, p_codes, BITS, TAIL)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _apply_derivative_kernel(
    p_y, p_index, p_seed, p_codes, p_out, n_rows, n_tiles, n_columns, stride, row_bytes, parameter, low, step,
    FUNCTION: tl.constexpr, BITS: tl.constexpr, HAS_INDEX: tl.constexpr, TAIL: tl.constexpr, B_K: tl.constexpr,
):  # fmt: skip
    """n_tiles tiles of B_K rows and 64 columns.

    p_y: (N, C), rows ``stride`` apart. p_out: (N, C), contiguous. step: of the codes. The others: as for packing.
    """
    i_g, o_j, first = program_place(n_columns, n_tiles, B_K)
    if FUNCTION != "relu" and FUNCTION != "leaky_relu" and FUNCTION != "hardtanh":
        low = tl.where(tl.load(p_seed) == NAN, float("nan"), low)
    for i_t in range(n_tiles):
        begin = first + i_t * B_K
        o_k = begin + tl.arange(0, B_K)
        m_k = o_k < n_rows
        m_y = m_k[:, None] & (o_j < n_columns)[None, :] if TAIL else m_k[:, None]
        o_row = tl.load(p_index + o_k, mask=m_k, other=0) if HAS_INDEX else o_k
        b_code = load_codes(o_k, m_k, i_g, n_columns, row_bytes, p_codes, BITS, TAIL)
        b_y = tl.load(p_y + o_row[:, None] * stride + o_j[None, :], mask=m_y, other=0.0).to(tl.float32)
        if FUNCTION == "relu" or FUNCTION == "hardtanh":
            b_out = tl.where(b_code > 256, b_y, 0.0)
        elif FUNCTION == "leaky_relu":
            b_out = tl.where(b_code > 256, b_y, b_y * parameter)
        else:
            b_row, b_column = tile_words(tl.load(p_seed), begin, i_g, B_K)
            b_out = b_y * (low + step * (b_code - 254.5 - dither(b_row, b_column, False)))
        tl.store(p_out + o_row[:, None] * n_columns + o_j[None, :], b_out.to(p_out.dtype.element_ty), mask=m_y)


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
        name: "gelu", "gelu_tanh", "silu", "quick_gelu", "mish", "hardswish", "sigmoid", "tanh", "elu", or "relu",
            "leaky_relu" and "hardtanh", which are exact in one bit.
        parameters: (α,) of "elu", (slope,) of "leaky_relu", (least, most) of "hardtanh"; () for the others.
        line: Low end of the derivative's range, and the step from one code to the next.
        bits: 8, 4, 2 or 1.
        seed: int64, shape (1,), which becomes −2⁶³ if the rows have a NaN; None where one bit is exact.
        index: Rows to store, int64, shape (n,); None for all.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    (low, step), (rows, row_bytes), columns = line, codes.shape, x.shape[1]
    low = parameters[1] if name == "hardtanh" else low
    if codes.numel():
        taken, grid = tiles(rows, cdiv(columns, GROUP))
        launch(
            _pack_derivative_kernel, grid,
            x, index, seed, codes, rows, taken, columns, x.stride(0), row_bytes, float((*parameters, 0.0)[0]), low,
            1.0 / step, FUNCTION=name, BITS=bits, HAS_INDEX=index is not None, TAIL=columns % GROUP != 0,
            B_K=ROWS,
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
    (rows, row_bytes), columns = codes.shape, y.shape[1]
    if codes.numel():
        taken, grid = tiles(rows, cdiv(columns, GROUP))
        launch(
            _apply_derivative_kernel, grid,
            y, index, seed, codes, out, rows, taken, columns, y.stride(0), row_bytes, float((*parameters, 0.0)[0]),
            *line, FUNCTION=name, BITS=bits, HAS_INDEX=index is not None, TAIL=columns % GROUP != 0, B_K=ROWS,
        )  # fmt: skip
    return out
