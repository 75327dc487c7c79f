"""dropout: elements that Philox keeps, and keeps again for the same seed, so that no mask is stored."""

import torch
import triton
import triton.language as tl

from .draws import words
from .launch import cdiv, launch

_COUNTERS = 1024  # of a tile, which has four elements for each


@triton.jit(do_not_specialize=["n_elements", "threshold"])
def _dropout_kernel(p_x, p_seed, p_out, n_elements, threshold, scale, B_E: tl.constexpr):
    """A tile of 4 · B_E elements: word j of counter i is that of element j · B_E + i.

    p_x: (E,). p_seed: int64 (1,). p_out: (E,).
    """
    i_tile = tl.program_id(0).to(tl.int64)
    o_i = tl.arange(0, B_E)
    o_0 = i_tile * (4 * B_E) + o_i
    o_1, o_2, o_3 = o_0 + B_E, o_0 + 2 * B_E, o_0 + 3 * B_E
    b_0 = tl.load(p_x + o_0, mask=o_0 < n_elements, other=0.0)
    b_1 = tl.load(p_x + o_1, mask=o_1 < n_elements, other=0.0)
    b_2 = tl.load(p_x + o_2, mask=o_2 < n_elements, other=0.0)
    b_3 = tl.load(p_x + o_3, mask=o_3 < n_elements, other=0.0)
    first, second, third, fourth = words(tl.load(p_seed), i_tile * B_E + o_i, 0)
    tl.store(p_out + o_0, _dropped(b_0, first, threshold, scale), mask=o_0 < n_elements)
    tl.store(p_out + o_1, _dropped(b_1, second, threshold, scale), mask=o_1 < n_elements)
    tl.store(p_out + o_2, _dropped(b_2, third, threshold, scale), mask=o_2 < n_elements)
    tl.store(p_out + o_3, _dropped(b_3, fourth, threshold, scale), mask=o_3 < n_elements)


@triton.jit
def _dropped(b_x, word, threshold, scale):
    """Multiply by 0 or the scale: NaN and infinities arrive."""
    b_factor = tl.where(word.to(tl.int32, bitcast=True) < threshold, 0.0, scale)
    return (b_x.to(tl.float32) * b_factor).to(b_x.dtype)


def dropout(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    """Set elements to zero with probability p, and divide the others by the probability that they are kept.

    The probability is p to 2⁻³³. Every element has a word of its own, by its place among all elements: a tensor of the
    same shape, such as a gradient, has the same elements set to zero.

    Args:
        x: float16, bfloat16 or float32, any shape.
        seed: int64, shape (1,).
        p: Above 0 and below 1.

    Returns:
        Shape and dtype of ``x``, contiguous.
    """
    x, drops = x.contiguous(), min(round(p * 2**32), 2**32 - 1)
    out = torch.empty_like(x)
    if x.numel():
        launch(
            _dropout_kernel,
            (cdiv(x.numel(), 4 * _COUNTERS),),
            x,
            seed,
            out,
            x.numel(),
            drops - 2**31,
            2**32 / (2**32 - drops),
            B_E=_COUNTERS,
        )
    return out
