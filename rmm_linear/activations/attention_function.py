"""The autograd function of attention that saves packed queries, keys and values, and which calls it can serve."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from rmm_linear._support.autocast import autocast_dtype, autocast_off, cast
from rmm_linear._support.distributed import is_dtensor
from rmm_linear.activations.base import SavingCall
from rmm_linear.context.call_inputs import HostRead, waits
from rmm_linear.layers.function import SavingFunction, as_no_view
from rmm_linear.ops.attention import attention_backward, attention_with_dropout, dropped_attention, pack_attention
from rmm_linear.ops.dispatch import TAKES_TAGS
from rmm_linear.ops.fused_attention import KERNELS, chosen_kernel, repeated, runs_kernels, shares_heads, why_no_kernel
from rmm_linear.ops.masks import pack_mask
from rmm_linear.packing.attention import AttentionSpec, Bits, hides_padding, score_rows
from rmm_linear.packing.attention_gradients import biased
from rmm_linear.sketches.seeds import draw_seed, is_capturing

logger = logging.getLogger(__name__)

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
                output, kept = _dropped(query, key, value, mask, bias, ctx.spec, call.index)
            seed = call.seed
            if seed is None and not torch.compiler.is_compiling():
                seed = draw_seed()  # after the mask of dropout, which has the random numbers of PyTorch
            stored = pack_attention(query, key, value, call.index, kv_index, seed, *ctx.bits)
        # Seed and indices are saved tensors: on ctx, a recomputation could not replace them.
        ctx.save_for_backward(stored, mask, kept, call.index, kv_index, bias)
        return as_no_view(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
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
        found = (
            (one if one.dtype == dtype else one.to(dtype)).transpose(1, 2)
            for one, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return *found, None, None, None, None, grad_bias, None


def _added(mask: Tensor | None, bias: Tensor | None, is_causal: bool) -> tuple[Tensor | None, bool]:
    """Return the mask to add to the scores, and whether they are causal in addition."""
    if bias is None:
        return mask, is_causal
    if is_causal:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    return biased(mask, bias, bias.dtype), False


def _dropped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    spec: AttentionSpec,
    index: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the output with dropout, and what the backward pass finds the same scores by: their bits, or a state."""
    if runs_kernels(query):
        why = why_no_kernel(query, value, bias is not None)
        found = None if why else _by_kernel(query, key, value, mask, spec)
        if found is not None:
            return found
        if not torch.compiler.is_compiling():
            _warn_of_scores(why or "PyTorch has no fused kernel for it here")
    # The random numbers that PyTorch's dropout draws on CPU.
    kept = query.new_empty(*query.shape[:3], key.shape[2], dtype=torch.bool).bernoulli(1 - spec.p)
    added, is_causal = _added(mask, bias, spec.is_causal)
    output = dropped_attention(query, key, value, added, kept, spec.scale, is_causal, spec.p)
    return output, pack_mask(kept.flatten(0, 2), score_rows(index, query.shape[1], query.shape[2]))


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor] | None:
    """Return what :func:`attention_with_dropout` does, with the kernel of PyTorch's own choice; None if it is none."""
    kernel, enable_gqa = None, shares_heads(query, key, value, mask)
    if not enable_gqa:
        key, value = (repeated(one, query.shape[1]) for one in (key, value))
    if torch.compiler.is_compiling():
        if not TAKES_TAGS:  # compilers would repeat the operator with other random numbers
            return None
    elif not isinstance(query, FakeTensor):
        kernel = chosen_kernel(query, key, value, mask, spec, enable_gqa)
        if kernel not in KERNELS:
            return None
    number = -1 if kernel is None else kernel.value
    return attention_with_dropout(query, key, value, mask, spec.scale, spec.is_causal, spec.p, enable_gqa, number)


@functools.cache
def _warn_of_scores(why: str) -> None:
    """Say once what it costs where dropout cannot be repeated by a kernel."""
    logger.warning(
        "Attention with dropout makes all scores in float32, in both passes, and saves a bit of each: %s. This takes "
        "several times the time of a fused kernel. Set the dropout of attention to 0, or leave such attentions exact.",
        why,
    )


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


def why_elsewhere(*tensors: Tensor) -> str | None:
    """Say why attention reaches further than the tensors of this process; None if it does not."""
    function = F.scaled_dot_product_attention
    if function is not torch._C._nn.scaled_dot_product_attention and not hasattr(function, "rmm_is_local"):  # pyright: ignore
        return (
            "F.scaled_dot_product_attention is replaced, as by context parallelism, which attends to tokens of other "
            "processes"
        )
    if any(map(is_dtensor, tensors)):
        return "its queries, keys or values are distributed tensors. Parallelize with use_local_output=True"
    return None


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
    if p and not torch.compiler.is_compiling() and is_capturing(query.device):
        return "a CUDA graph is captured, in which the state that dropout is drawn from cannot be read"
    return "dropout has probability 1" if p >= 1 else why_elsewhere(query, key, value)


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
