"""The gradients of attention on CUDA with the fused kernels of PyTorch, from unpacked queries, keys and values.

These kernels need the output and the logarithms of the sums of exponentials, which are not saved: one more forward pass
on what was unpacked makes both, so they belong to the same probabilities as the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from rmm_linear.packing.attention import AttentionSpec, additive

_ALIGNED = 16  # elements: of the rows of a mask, in memory


def fused_gradients(
    grad_output: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    spec: AttentionSpec,
    mask: Tensor | None,
    index: Tensor | None,
    kv_index: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the gradients with respect to queries, keys and values, without dropout.

    Args:
        grad_output: dO, shape (B, Tq, h, dv), on CUDA.
        rows: Unpacked queries (n, h · d), keys (nk, hk · d) and values (nk, hk · dv), dtype of ``grad_output``.
        spec: The attention.
        mask: Bool or additive, shape (B or 1, h or 1, Tq, Tk), or None.
        index: Tokens of the rows of queries; None for all.
        kv_index: Tokens of the rows of keys and values; None for all.

    Returns:
        Shapes (B, Tq, h, d), (B, Tk, hk, d) and (B, Tk, hk, dv); None where no fused kernel takes these arguments.
    """
    batch, queries, heads, _ = grad_output.shape
    group = heads // spec.kv_heads
    y = grad_output.flatten(0, 1)
    y = y if index is None else torch.zeros_like(y).index_copy_(0, index, y.index_select(0, index))
    y, query = (_by_head(tensor, batch, queries, heads, at) for tensor, at in ((y, None), (rows[0], index)))
    key, value = (_by_head(tensor, batch, spec.keys, spec.kv_heads, kv_index) for tensor in rows[1:])
    key, value = (tensor if group == 1 else tensor.repeat_interleave(group, 1) for tensor in (key, value))
    bias = None if mask is None else _aligned(additive(mask, query.dtype), (batch, heads, queries, spec.keys))
    found = _kernel_gradients(y, query, key, value, bias, spec)
    if found is None:
        return None
    dq, dk, dv = (gradient.transpose(1, 2) for gradient in found)
    if group > 1:
        dk, dv = (gradient.unflatten(2, (spec.kv_heads, group)).sum(3) for gradient in (dk, dv))
    return dq, dk, dv


def _kernel_gradients(
    y: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor] | None:
    aten, tensors, causal, scale = torch.ops.aten, (query, key, value), spec.is_causal, spec.scale
    choice = SDPBackend(aten._fused_sdp_choice(*tensors, bias, 0.0, causal, scale=scale))
    if choice not in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        return None
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    fits_flash = is_half and bias is None and query.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    fits_flash = fits_flash and not (causal and query.shape[2] != key.shape[2])  # it aligns the last tokens
    if choice != SDPBackend.EFFICIENT_ATTENTION and fits_flash:
        made = aten._scaled_dot_product_flash_attention(*tensors, 0.0, causal, False, scale=scale)
        output, sums, *lengths, state, unused = made[:8]
        return aten._scaled_dot_product_flash_attention_backward(
            y, *tensors, output, sums, *lengths, 0.0, causal, state, unused, scale=scale
        )
    if query.shape[-1] % 8 or value.shape[-1] % 8:
        return None
    output, sums, *state = aten._scaled_dot_product_efficient_attention(*tensors, bias, True, 0.0, causal, scale=scale)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        y, *tensors, bias, output, sums, *state, 0.0, [True, True, True, False], causal, scale=scale
    )
    return dq, dk, dv


def _by_head(rows: Tensor, batch: int, tokens: int, heads: int, index: Tensor | None) -> Tensor:
    """(n, h · d) to (B, h, T, d), 0 for tokens that have no row."""
    rows = rows.flatten(1)
    if index is not None:
        rows = rows.new_zeros(batch * tokens, rows.shape[1]).index_copy_(0, index, rows)
    return rows.view(batch, tokens, heads, -1).transpose(1, 2)


def _aligned(bias: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """The mask of all heads, as a view of memory in which every row begins at a multiple of 16 elements."""
    keys = bias.shape[-1]
    return F.pad(bias, (0, -keys % _ALIGNED))[..., :keys].expand(shape)
