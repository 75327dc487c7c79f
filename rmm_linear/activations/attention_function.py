"""The autograd function of attention that saves packed queries, keys and values, and which calls it can serve."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rmm_linear._support.autocast import autocast_dtype, autocast_off, cast
from rmm_linear.activations.base import SavingCall
from rmm_linear.context.call_inputs import HostRead, waits
from rmm_linear.layers.function import SavingFunction, as_no_view
from rmm_linear.ops.attention import attention_backward, dropped_attention, pack_attention
from rmm_linear.ops.masks import pack_mask
from rmm_linear.packing.attention import AttentionSpec, Bits, hides_padding, score_rows
from rmm_linear.packing.attention_gradients import biased
from rmm_linear.sketches.seeds import draw_seed

_SEEN = (
    "Keys and values of padding were left out of what attention saved, because in earlier steps no valid token saw "
    "them, but the mask of this step lets one. Its gradients are incomplete: drop them with zero_grad, and go on with "
    "the next step, which saves such keys and values. Or convert with mask_padding=False."
)
Exact = Callable[..., Tensor]
BITS = 4  # the default of attention_bits


@dataclass(eq=False)  # frozen, it would take a microsecond more
class Attention:
    """The arguments of one call that are not tensors."""

    scale: float
    is_causal: bool = False
    p: float = 0.0
    bits: int | Bits = BITS


class AttentionFunction(SavingFunction):
    """Attention that saves packed queries, keys and values. Shapes as for ``F.scaled_dot_product_attention``."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        attention: Attention,
        call: SavingCall,
        exact: Exact,
        bias: Tensor | None = None,
        kv_index: Tensor | None = None,
    ) -> Tensor:
        """Apply attention; ``exact`` makes the output without dropout, shape (B, Tq, h, dv)."""
        bits = attention.bits
        ctx.bits, ctx.call, ctx.dtypes = (
            (bits,) * 3 if isinstance(bits, int) else bits,
            call,
            (query.dtype, key.dtype, value.dtype),
        )
        sizes = key.shape[2], key.shape[1], key.shape[3]
        ctx.spec = AttentionSpec(*sizes, attention.scale, attention.is_causal, attention.p)
        output = exact(query, key, value) if not attention.p else None
        dtype = autocast_dtype(query.device.type, query.dtype)
        query, key, value = (cast(tensor, dtype) for tensor in (query, key, value))
        with autocast_off(query.device.type):
            kept = None
            if output is None:
                kept = _kept(query, key, attention.p)
                added, is_causal = _added(mask, bias, attention.is_causal)
                output = dropped_attention(query, key, value, added, kept, attention.scale, is_causal, attention.p)
                rows = score_rows(call.index, query.shape[1], query.shape[2])
                kept = pack_mask(kept.flatten(0, 2), rows)
            seed = call.seed
            if seed is None and not torch.compiler.is_compiling():
                seed = draw_seed()  # after the mask of dropout, which has the random numbers of PyTorch
            stored = pack_attention(query, key, value, call.index, kv_index, seed, *ctx.bits)
        # Seed and indices are saved tensors: on ctx, a recomputation could not replace them.
        ctx.save_for_backward(stored, mask, kept, call.index, kv_index, bias)
        return as_no_view(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients."""
        (y,) = grad_outputs
        SavingFunction.received(ctx, y, "a packed attention", (y.shape[0] * y.shape[1], y.shape[2] * y.shape[3]))
        stored, mask, kept, index, kv_index, bias = ctx.saved_tensors
        if ctx.call.hidden is not None and not ctx.call.hidden.values[0]:
            ctx.call.answers.update({kind: (False, asked) for kind, (_, asked) in ctx.call.answers.items()})
            raise RuntimeError(_SEEN)
        grad_bias, needs_bias = None, bias is not None and ctx.needs_input_grad[7]
        with autocast_off(y.device.type):
            *gradients, of_bias = attention_backward(
                y, stored, mask, kept, index, kv_index, ctx.spec, ctx.bits, bias, needs_bias
            )
            if bias is not None and needs_bias:
                grad_bias = of_bias.to(bias.dtype)
        found = (one.transpose(1, 2).to(dtype) for one, dtype in zip(gradients, ctx.dtypes, strict=True))
        return *found, None, None, None, None, grad_bias, None


def _added(mask: Tensor | None, bias: Tensor | None, is_causal: bool) -> tuple[Tensor | None, bool]:
    """Return the mask to add to the scores, and whether they are causal in addition."""
    if bias is None:
        return mask, is_causal
    if is_causal:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    return biased(mask, bias, bias.dtype), False


def _kept(query: Tensor, key: Tensor, p: float) -> Tensor:
    """Find the scores that dropout keeps, by the random numbers that PyTorch's dropout draws on CPU."""
    return query.new_empty(*query.shape[:3], key.shape[2], dtype=torch.bool).bernoulli(1 - p)


def _kv_index(
    key: Tensor, mask: Tensor | None, scores: tuple[int, int], is_causal: bool, call: SavingCall
) -> Tensor | None:
    """Return the tokens whose keys and values are packed: padding leaves only where no valid query sees it."""
    # Only a module's first forward pass with padding waits for the device. Later ones assume the same answer, and their
    # backward passes check it.
    index, (batch, _, keys, _) = call.index, key.shape
    if index is None or call.mask is None or len(call.mask.order) != batch * keys:
        return None
    for other, version, causal, answer in call.mask.answers:  # of other layers, in this forward pass
        is_same = mask is None if other is None else other() is mask and mask is not None and version == mask._version
        if is_same and causal == is_causal:
            hidden = answer
            break
    else:
        with torch.no_grad(), _disable_current_modes():  # a recomputation, which knows the answer, need not run it
            hides = hides_padding(call.mask.valid.view(batch, keys), _of_scores(mask, scores), is_causal)
            hidden = HostRead(hides.view(1).to(torch.int64))
        reference = (None, 0) if mask is None else (weakref.ref(mask), mask._version)
        call.mask.answers.append((*reference, is_causal, hidden))
    if not waits(key.device):
        return index if hidden.values[0] else None
    kind, now = (mask is None, is_causal), None if call.forward_pass is None else call.forward_pass.begin
    was_hidden, asked = call.answers.get(kind, (True, now))
    if was_hidden and now is not None and asked != now:  # asked in another forward pass
        call.hidden = hidden
        return index
    was_hidden = was_hidden and bool(hidden.values[0])
    call.answers[kind] = was_hidden, now
    return index if was_hidden else None


def why_exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, p: float) -> str | None:
    """Return why a call of attention cannot be packed, or None. Shapes as of :func:`packed_attention`."""
    if query.is_nested or not all(tensor.dim() == 4 for tensor in (query, key, value)):
        return "queries, keys and values are not of the shape (batch, heads, tokens, features)"
    if not query.shape[0] == key.shape[0] == value.shape[0] or query.shape[1] % key.shape[1]:
        return "queries and keys have different batches, or heads of queries do not share heads of keys evenly"
    if mask is not None and mask.requires_grad:
        return "the attention mask needs a gradient"
    if mask is not None and is_causal:
        return "a mask and is_causal=True are given together"
    if is_causal and query.shape[2] != key.shape[2]:
        return "a causal attention has more keys than queries, as with a KV cache"
    return None if p < 1 else "dropout has probability 1"


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    attention: Attention,
    call: SavingCall,
    exact: Exact,
    bias: Tensor | None = None,
) -> Tensor:
    """Apply attention and save it packed. The caller has asked :func:`why_exact` before.

    query: (B, h, Tq, d). key: (B, hk, Tk, d). value: (B, hk, Tk, dv). mask: Bool or additive, broadcasts with (B, h,
    Tq, Tk), or None. call: Seed and padding; without a seed, one is drawn after the mask of dropout. exact: Computes
    the output without dropout, (B, Tq, h, dv), from queries, keys and values. bias: Added to the scores where a bool
    mask is true, (B or 1, h or 1, Tq, Tk), or None.
    """
    scores = query.shape[2], key.shape[2]
    kv_index = _kv_index(key, mask, scores, attention.is_causal, call)
    return AttentionFunction.run(query, key, value, _of_scores(mask, scores), attention, call, exact, bias, kv_index)


def _of_scores(mask: Tensor | None, scores: tuple[int, int]) -> Tensor | None:
    """Return a mask of the shape (B or 1, h or 1, Tq, Tk)."""
    return None if mask is None else mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape).expand(-1, -1, *scores)
