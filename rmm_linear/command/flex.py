"""Let a model on the meta device count as ``attn_implementation="flex_attention"`` computes its attention.

Models whose attention PyTorch's fused one cannot express, such as gpt-oss with its sinks, are loaded with eager
attention unless another is asked for: it has all scores at once, T² of them. Flex attention has none. Its kernel is
made for a GPU by a compiler, so a stand-in makes the tensors that it makes: the output, and a sum and a maximum per row
and head in float32; in the backward pass a number per row and head, and the gradients of queries, keys and values. A
sink scales the output behind it, and the mask is in numbers of blocks.

Source: PyTorch's torch/_inductor/kernel/flex/flex_attention.py, and transformers' integrations/flex_attention.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from rmm_linear._support.sizes import show_both
from rmm_linear.activations.experts import is_experts
from rmm_linear.fitting.quantised import QuantizedLinear

NAME = "rmm_linear_flex"
_BLOCK = 128  # rows of a block of the mask


class _BlockMask:
    """The tensors of a mask: for rows and columns, partial and full blocks, how many there are, and which."""

    def __init__(self, rows: int, columns: int) -> None:
        rows, columns = -(-rows // _BLOCK), -(-columns // _BLOCK)
        shapes = [(rows,), (rows, columns), (columns,), (columns, rows)] * 2
        self.tensors = [torch.empty(1, 1, *shape, dtype=torch.int32) for shape in shapes]


def _mask(batch_size: int, q_length: int, kv_length: int, *_: Any, **__: Any) -> _BlockMask:
    return _BlockMask(q_length, kv_length)


class _Flex(torch.autograd.Function):
    """The kernel; queries (B, H, T, D), keys and values (B, H / n, S, D)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        if any(type(mode).__module__ == FlopCounterMode.__module__ for mode in _get_current_dispatch_mode_stack()):
            columns = key.new_empty(query.shape[0] * query.shape[1], query.shape[-1], window or key.shape[2])
            torch.bmm(torch.bmm(query.flatten(0, 1), columns), columns.transpose(1, 2))
        output, sums = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums, torch.empty_like(sums))
        return output, sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, sums, _ = ctx.saved_tensors
        delta = torch.empty_like(sums)
        found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del delta
        return *found, None


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    s_aux: Tensor | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    output, sums = _Flex.apply(query, key, value, named.get("sliding_window"))
    if s_aux is not None:  # the share of the sum that is not the sink's
        output = (output * torch.sigmoid(sums.to(value.dtype) - s_aux[:, None]).unsqueeze(-1)).to(query.dtype)
    return output.transpose(1, 2).contiguous(), None


def counted_as_trained(model: Any) -> list[str]:
    """Give a model of transformers on the meta device the stand-in, if it has flex attention and no fused one."""
    notes = list[str]()
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    is_meta = next(inner.parameters()).is_meta
    is_eager = getattr(inner.config, "_attn_implementation", "") == "eager"
    if is_meta and is_eager and getattr(inner, "_supports_flex_attn", False):
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, _mask)
        inner.set_attn_implementation(NAME)
        notes.append(
            f"{type(inner).__name__} has no fused attention. It counts with flex attention: load it with "
            'attn_implementation="flex_attention". Its default is eager, which has the scores of all pairs of tokens.'
        )
    experts = [part for part in inner.modules() if is_experts(part)]
    stay = sum(p.nbytes for part in experts for p in part.parameters() if not p.requires_grad)
    if any(isinstance(part, QuantizedLinear) for part in inner.modules()) and stay:
        notes.append(
            f"{show_both(stay)} of experts stay in 16 bits: bitsandbytes quantizes linear layers alone, and "
            "transformers dequantizes MXFP4 to train. In 4 bits they would take a quarter."
        )
    return notes
