"""activate_and_pack and square_and_pack: a pointwise function and what its backward pass needs, in one pass.

The codes are those of ``pack_derivative`` and ``pack`` for the same seed. The function is computed in float32 and
rounded once to the dtype of its input. With u = 2⁻²⁴, its error before that is below 16 u · max(|x|, |g(x)|): PyTorch's
own formulas have errors of this kind too, as 1 + erf(x / √2) of GELU cancels for x < 0. Where g is linear near 0 (tanh,
ELU), it is below 16 u · |g(x)|.
"""

import torch
import triton
import triton.language as tl

from .derivatives import code_of, normal_cdf, note_nan, sigmoid
from .draws import known_seed
from .groups import GROUP, ROWS, program_place, rotation, row_words, store_codes, store_packed, tile_words
from .launch import Seed, cdiv, given, is_ieee, launch, places
from .packing import empty_sketch, tiles

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
def value(b_x, parameter, low, FUNCTION: tl.constexpr):
    """g(x), float32, any shape.

    b_x: float32; of ±∞ and NaN the results are PyTorch's. parameter: α of "elu", slope of "leaky_relu", least of
    "hardtanh", whose most is ``low``.
    """
    b_c = tl.where(b_x > -_FAR, tl.minimum(b_x, _FAR), -_FAR)
    if FUNCTION == "gelu":
        b_phi, _ = normal_cdf(b_c)
        return b_x * b_phi
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
    elif FUNCTION == "hardtanh":
        return tl.where(b_x <= parameter, parameter, tl.where(b_x >= low, low, b_x))
    else:
        tl.static_assert(FUNCTION == "leaky_relu")
        return tl.where(b_x > 0, b_x, b_x * parameter)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def _activate_kernel(
    p_x, p_place, p_seed, p_out, p_codes, n_rows, n_tiles, n_columns, stride, row_bytes, parameter, low, inverse,
    FUNCTION: tl.constexpr, BITS: tl.constexpr, HAS_PLACE: tl.constexpr, TAIL: tl.constexpr, B_K: tl.constexpr,
):  # fmt: skip
    """n_tiles tiles of B_K rows and 64 columns.

    p_x: (N, C), rows ``stride`` apart. p_place: int64 (N,), the row of codes, or −1. p_seed: int64 (1,). p_out: (N, C),
    contiguous. p_codes: uint8 (n, row_bytes). parameter, low, inverse: see _pack_derivative_kernel.
    """
    i_g, o_j, first = program_place(n_columns, n_tiles, B_K)
    for i_t in range(n_tiles):
        begin = first + i_t * B_K
        o_n = begin + tl.arange(0, B_K)
        m_n = o_n < n_rows
        m_x = m_n[:, None] & (o_j < n_columns)[None, :] if TAIL else m_n[:, None]
        o_k = tl.load(p_place + o_n, mask=m_n, other=-1) if HAS_PLACE else o_n
        m_k = (o_k >= 0) & m_n
        o_k = tl.maximum(o_k, 0)
        b_x = tl.load(p_x + o_n[:, None] * stride + o_j[None, :], mask=m_x, other=0.0).to(tl.float32)
        b_out = value(b_x, parameter, low, FUNCTION).to(p_out.dtype.element_ty)
        tl.store(p_out + o_n[:, None] * n_columns + o_j[None, :], b_out, mask=m_x)
        if FUNCTION == "relu" or FUNCTION == "leaky_relu" or FUNCTION == "hardtanh":
            b_code = code_of(b_x, o_k, o_j, parameter, low, inverse, FUNCTION)
        else:
            b_row, b_column = tile_words(tl.load(p_seed), begin, i_g, B_K)
            if HAS_PLACE:
                b_row = row_words(tl.load(p_seed), o_k)
            b_code = code_of(b_x, b_row, b_column, parameter, low, inverse, FUNCTION)
            note_nan(b_x, m_k, p_seed)
        store_codes(b_code, o_k, m_k, i_g, n_columns, row_bytes, p_codes, BITS, TAIL)


@triton.jit(do_not_specialize=["seed", "n_fresh", "n_rows"])
def _square_kernel(
    p_x, p_place, p_seed, seed: tl.int64, n_fresh, p_out, p_codes, p_scales, n_rows, n_columns, stride, row_bytes,
    BITS: tl.constexpr, HAS_PLACE: tl.constexpr, IEEE: tl.constexpr, TAIL: tl.constexpr, B_K: tl.constexpr,
):  # fmt: skip
    """One tile of B_K rows and one group.

    p_x, p_place, p_out: see _activate_kernel. p_seed, seed, n_fresh: see known_seed. p_codes, p_scales: see
    store_packed.
    """
    seed = known_seed(p_seed, seed, n_fresh)
    i_g, o_j, begin = program_place(n_columns, 1, B_K)
    o_n = begin + tl.arange(0, B_K)
    m_n = o_n < n_rows
    m_x = m_n[:, None] & (o_j < n_columns)[None, :]
    o_k = tl.load(p_place + o_n, mask=m_n, other=-1) if HAS_PLACE else o_n
    b_x = tl.load(p_x + o_n[:, None] * stride + o_j[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_x = tl.where(b_x <= 0, 0.0, b_x)
    tl.store(p_out + o_n[:, None] * n_columns + o_j[None, :], (b_x * b_x).to(p_out.dtype.element_ty), mask=m_x)
    m_k = (o_k >= 0) & m_n
    o_k = tl.maximum(o_k, 0)
    b_row, b_column = tile_words(seed, begin, i_g, B_K)
    if HAS_PLACE:
        b_row = row_words(seed, o_k)
    store_packed(
        b_x, rotation(seed, tl.float32), b_row, b_column, o_k, m_k, i_g, n_columns, row_bytes, p_codes, p_scales,
        BITS, IEEE, TAIL,
    )  # fmt: skip


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
        parameters: (α,) of "elu", (slope,) of "leaky_relu", (least, most) of "hardtanh"; () for the others.
        line: Low end of the derivative's range, and the step from one code to the next.
        bits: 8, 4, 2 or 1.
        seed: int64, shape (1,), which becomes −2⁶³ if the stored rows have a NaN; None where one bit is exact.
        index: Rows whose codes are stored, int64, shape (n,); None for all.

    Returns:
        g(x) of all rows, shape (N, C), dtype of ``x``, contiguous.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (low, step), (rows, columns) = line, x.shape
    low = parameters[1] if name == "hardtanh" else low
    if out.numel():
        taken, grid = tiles(rows, cdiv(columns, GROUP))
        launch(
            _activate_kernel, grid,
            x, places(index, rows), seed, out, codes, rows, taken, columns, x.stride(0), codes.shape[1],
            float((*parameters, 0.0)[0]), low, 1.0 / step, FUNCTION=name, BITS=bits,
            HAS_PLACE=index is not None, TAIL=columns % GROUP != 0, B_K=ROWS,
        )  # fmt: skip
    return out


def square_and_pack(
    x: torch.Tensor,
    bits: int,
    seed: Seed,
    index: torch.Tensor | None = None,
    saved: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute relu(x)², and pack relu(x) as ``pack`` does, in one pass.

    Args:
        x: float16, bfloat16 or float32, shape (N, C), any row stride.
        bits: 8, 4 or 2.
        seed: int64, shape (1,), on the device of ``x``; or to be written there, see ``given``.
        index: Rows to pack, int64, shape (n,); None for all.
        saved: Codes and scales are written into them, contiguous; None makes them.

    Returns:
        relu(x)² of all rows, shape (N, C), dtype of ``x``; codes, uint8, shape (n, ⌈C·bits/8⌉), and scales, uint8,
        shape (n, ⌈C/64⌉).
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kept = rows if index is None else index.shape[0]
    codes, scales = empty_sketch(kept, columns, bits, x) if saved is None else saved
    seeds = given(seed, out.numel() > 0)
    if out.numel():
        grid = (cdiv(rows, ROWS) * cdiv(columns, GROUP),)
        launch(
            _square_kernel, grid,
            x, places(index, rows), *seeds, out, codes, scales, rows, columns, x.stride(0), codes.shape[1],
            BITS=bits, HAS_PLACE=index is not None, IEEE=is_ieee(), TAIL=columns % GROUP != 0, B_K=ROWS,
        )  # fmt: skip
    return out, codes, scales
