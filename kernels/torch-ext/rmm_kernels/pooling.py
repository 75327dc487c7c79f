"""max_pool and max_pool_backward: which element of its window each output is, in as few bits as the window needs."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .launch import cdiv, launch

_BLOCK = 512  # elements of a program


@triton.jit
def _unfolded(o_e, n_channels, height, width, LAST: tl.constexpr):
    """Of elements in the order of memory: their row, their column, the plane or sample, and the channel if LAST."""
    if LAST:
        o_c = o_e % n_channels
        o_e = o_e // n_channels
    else:
        o_c = o_e * 0
    o_y = o_e // width
    return o_y % height, o_e % width, o_y // height, o_c


@triton.jit
def _max_pool_kernel(
    p_x, p_out, p_bits, n_elements, n_channels, height, width, out_height, out_width,
    kernel_y, kernel_x, step_y, step_x, pad_y, pad_x, dilation_y, dilation_x,
    LAST: tl.constexpr, SMALL: tl.constexpr, BITS: tl.constexpr, B_E: tl.constexpr,
):  # fmt: skip
    """B_E outputs: the greatest of each window, or its last NaN.

    p_x, p_out: planes of height · width, and of out_height · out_width, or such planes of n_channels side by side:
    LAST. p_bits: uint8 (BITS, ⌈n_elements / 8⌉). SMALL: whether places have 32 bits.
    """
    o_e = tl.program_id(0).to(tl.int64) * B_E + tl.arange(0, B_E)
    m_e = o_e < n_elements
    o_y, o_x, o_p, o_c = _unfolded(o_e.to(tl.int32) if SMALL else o_e, n_channels, out_height, out_width, LAST)
    o_y, o_x = o_y * step_y - pad_y, o_x * step_x - pad_x
    p_plane = p_x + o_p.to(tl.int64) * height * width * n_channels + o_c
    b_best = tl.full((B_E,), float("-inf"), tl.float32)
    # The first element of the window that is no padding, where all are -∞.
    b_place = tl.maximum((dilation_y - 1 - o_y) // dilation_y, 0) * kernel_x
    b_place = (b_place + tl.maximum((dilation_x - 1 - o_x) // dilation_x, 0)).to(tl.int32)
    for i_w in range(kernel_y * kernel_x):
        o_h, o_w = o_y + i_w // kernel_x * dilation_y, o_x + i_w % kernel_x * dilation_x
        m_x = m_e & (o_h >= 0) & (o_h < height) & (o_w >= 0) & (o_w < width)
        b_x = tl.load(p_plane + (o_h * width + o_w) * n_channels, mask=m_x, other=float("-inf")).to(tl.float32)
        m_x = m_x & ((b_x > b_best) | (b_x != b_x))
        b_best, b_place = tl.where(m_x, b_x, b_best), tl.where(m_x, i_w, b_place)
    tl.store(p_out + o_e, b_best.to(p_out.dtype.element_ty), mask=m_e)
    b_place = tl.where(m_e, b_place, 0)
    o_b = tl.program_id(0).to(tl.int64) * (B_E // 8) + tl.arange(0, B_E // 8)
    n_bytes = tl.cdiv(n_elements, 8)
    for i_b in tl.static_range(BITS):
        b_bits = tl.reshape((b_place >> i_b) & 1, (B_E // 8, 8)) << tl.arange(0, 8)[None, :]
        tl.store(p_bits + i_b * n_bytes + o_b, tl.sum(b_bits, axis=1).to(tl.uint8), mask=o_b < n_bytes)


@triton.jit
def _max_pool_backward_kernel(
    p_y, p_bits, p_out, n_elements, n_bytes, n_channels, height, width, out_height, out_width,
    kernel_y, kernel_x, step_y, step_x, pad_y, pad_x, dilation_y, dilation_x,
    LAST: tl.constexpr, SMALL: tl.constexpr, BITS: tl.constexpr, B_E: tl.constexpr,
):  # fmt: skip
    """The gradient of B_E inputs: the sum of those of the outputs that they are.

    p_y, p_out: as p_out and p_x of _max_pool_kernel. p_bits: uint8 (BITS, n_bytes).
    """
    o_e = tl.program_id(0).to(tl.int64) * B_E + tl.arange(0, B_E)
    m_e = o_e < n_elements
    o_y, o_x, o_p, o_c = _unfolded(o_e.to(tl.int32) if SMALL else o_e, n_channels, height, width, LAST)
    o_y, o_x = o_y + pad_y, o_x + pad_x
    # The outputs whose windows reach an element, from the first one on.
    o_top = tl.maximum((o_y - (kernel_y - 1) * dilation_y + step_y - 1) // step_y, 0)
    o_left = tl.maximum((o_x - (kernel_x - 1) * dilation_x + step_x - 1) // step_x, 0)
    n_y, n_x = (kernel_y - 1) * dilation_y // step_y + 1, (kernel_x - 1) * dilation_x // step_x + 1
    o_plane = o_p.to(tl.int64) * out_height * out_width
    b_sum = tl.zeros((B_E,), dtype=tl.float32)
    for i_w in range(n_y * n_x):
        o_h, o_w = o_top + i_w // n_x, o_left + i_w % n_x
        b_y, b_x = o_y - o_h * step_y, o_x - o_w * step_x  # from the corner of the window
        m_w = m_e & (b_y >= 0) & (b_x >= 0) & (o_h < out_height) & (o_w < out_width)
        m_w = m_w & (b_y % dilation_y == 0) & (b_x % dilation_x == 0)
        o_out = (o_plane + o_h * out_width + o_w) * n_channels + o_c
        b_place = tl.zeros((B_E,), dtype=tl.int32)
        for i_b in tl.static_range(BITS):
            b_byte = tl.load(p_bits + i_b * n_bytes + o_out // 8, mask=m_w, other=0).to(tl.int32)
            b_place |= ((b_byte >> (o_out % 8).to(tl.int32)) & 1) << i_b
        m_w = m_w & (b_place == b_y // dilation_y * kernel_x + b_x // dilation_x)
        b_sum += tl.load(p_y + o_out, mask=m_w, other=0.0).to(tl.float32)
    tl.store(p_out + o_e, b_sum.to(p_out.dtype.element_ty), mask=m_e)


def _launch(kernel: object, outer: tuple, numbers: tuple, is_last: bool, bits: int) -> None:
    """Launch a kernel for the elements of its argument that is written; ``outer``: its tensors and their numbers."""
    count, most = outer[3], max(one.numel() for one in outer[:3] if one.dtype != torch.uint8)
    launch(
        kernel, (cdiv(count, _BLOCK),), *outer, *numbers, LAST=is_last, SMALL=most < 2**31 - _BLOCK, BITS=bits,
        B_E=_BLOCK,
    )  # fmt: skip


def max_pool(
    x: torch.Tensor, outputs: Sequence[int], window: Sequence[Sequence[int]], bits: int, is_last: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pool planes, and store the position of each output in its window.

    Args:
        x: float16, bfloat16 or float32, shape (…, H, W), contiguous, or (N, C, H, W) with channels last.
        outputs: Height and width of the outputs' planes.
        window: Kernel, stride, padding and dilation, two numbers each; no window is padding alone.
        bits: Of a position.
        is_last: Whether ``x`` has channels last.

    Returns:
        The greatest of each window, as ``x`` lies in memory; and uint8 (bits, ⌈outputs / 8⌉), the bits of the
        positions, in the order of memory.
    """
    last = torch.channels_last if is_last else torch.contiguous_format
    out = torch.empty((*x.shape[:-2], *outputs), dtype=x.dtype, device=x.device, memory_format=last)
    stored = torch.empty(bits, cdiv(out.numel(), 8), dtype=torch.uint8, device=x.device)
    if out.numel():
        numbers = x.shape[1] if is_last else 1, *x.shape[-2:], *outputs, *(one for pair in window for one in pair)
        _launch(_max_pool_kernel, (x, out, stored, out.numel()), numbers, is_last, bits)
    return out, stored


def max_pool_backward(
    y: torch.Tensor, stored: torch.Tensor, size: Sequence[int], window: Sequence[Sequence[int]], is_last: bool
) -> torch.Tensor:
    """Compute the gradient with respect to the input, from what ``max_pool`` has stored.

    Args:
        y: Gradient with respect to the output, its shape and memory format.
        stored: uint8 (bits, ⌈outputs / 8⌉).
        size: Height and width of the input's planes.
        window: Kernel, stride, padding and dilation, two numbers each.
        is_last: Whether the input has channels last, and ``y``.

    Returns:
        Shape (…, H, W), dtype of ``y``; summed in float32.
    """
    last = torch.channels_last if is_last else torch.contiguous_format
    out = torch.empty((*y.shape[:-2], *size), dtype=y.dtype, device=y.device, memory_format=last)
    if out.numel():
        numbers = y.shape[1] if is_last else 1, *size, *y.shape[-2:], *(one for pair in window for one in pair)
        outer = y, stored, out, out.numel(), stored.shape[1]
        _launch(_max_pool_backward_kernel, outer, numbers, is_last, stored.shape[0])
    return out
