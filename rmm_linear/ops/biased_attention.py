"""The gradients of a packed attention with a bias of its scores that needs a gradient too, as relative positions do.

The scores are S + bias, so the gradient of the bias is dS, summed over what the bias is broadcast along. It is added up
while the blocks of scores are made, so it needs no more memory than the bias itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from rmm_linear.ops.attention import ATTENTION_BACKWARD, _backward_flops
from rmm_linear.ops.operator import operator
from rmm_linear.packing.attention import AttentionSpec
from rmm_linear.packing.attention_bias import Bias


@operator("biased_attention_backward")
def biased_attention_backward(
    grad_output: Tensor,
    stored: Tensor,
    bias: Tensor,
    needs_bias: bool,
    mask: Tensor | None,
    kept: Tensor | None,
    index: Tensor | None,
    kv_index: Tensor | None,
    keys: int,
    kv_heads: int,
    width: int,
    scale: float,
    is_causal: bool,
    p: float,
    bits_q: int,
    bits_k: int,
    bits_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients with respect to queries, keys, values and the bias of the scores.

    Args:
        grad_output: See :func:`rmm_linear.ops.attention.attention_backward`, as all that is not named here.
        stored: Packed queries, keys and values.
        bias: Added to the scores, shape (B or 1, h or 1, Tq, Tk).
        needs_bias: Whether its gradient is computed.
        mask: Bool or additive, or None.
        kept: Bits of dropout, or None.
        index: Tokens whose queries are packed.
        kv_index: Tokens whose keys and values are packed.
        keys: Tk.
        kv_heads: Heads of keys and values.
        width: d.
        scale: Factor of the scores.
        is_causal: Whether query i sees the keys 0 … i only.
        p: Probability of dropout.
        bits_q: Bits of queries.
        bits_k: Bits of keys.
        bits_v: Bits of values.

    Returns:
        The first three as of ``attention_backward``; and the shape of ``bias``, float32 at least, or (0,).
    """
    spec = AttentionSpec(keys, kv_heads, width, scale, is_causal, p)
    gradient = _empty(bias, needs_bias).zero_()
    own = Bias(bias, gradient if needs_bias else None)
    found = ATTENTION_BACKWARD(
        grad_output, stored, mask, kept, index, kv_index, spec=spec, bits=(bits_q, bits_k, bits_v), bias=own
    )
    dq, dk, dv = (one.contiguous() for one in found)
    return dq, dk, dv, gradient


def _empty(bias: Tensor, needs_bias: bool) -> Tensor:
    dtype = torch.promote_types(bias.dtype, torch.float32)
    return bias.new_empty(bias.shape if needs_bias else (0,), dtype=dtype)


@biased_attention_backward.register_fake
def _(grad_output, stored, bias, needs_bias, mask, kept, index, kv_index, keys, kv_heads, width, *named):
    batch, queries, heads, value_width = grad_output.shape
    return (
        grad_output.new_empty(batch, queries, heads, width),
        grad_output.new_empty(batch, keys, kv_heads, width),
        grad_output.new_empty(batch, keys, kv_heads, value_width),
        _empty(bias, needs_bias),
    )


@register_flop_formula(torch.ops.rmm_linear.biased_attention_backward)
def _(grad_output, stored, bias, needs_bias, *arguments, **named):
    return _backward_flops(grad_output, stored, *arguments)
