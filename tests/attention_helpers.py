"""Attention as a formula, for the tests of what packs it."""

import torch

from rmm_linear.packing.attention import AttentionSpec, additive, attention_rows, score_rows
from rmm_linear.packing.masks import pack_mask


def tensors(batch, heads, kv_heads, queries, keys, width, value_width, dtype=torch.float64, seed=0):
    """Queries, keys, values and the gradient of the output, the last of shape (B, Tq, h, dv)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, queries, width), (kv_heads, keys, width), (kv_heads, keys, value_width))
    q, k, v = (torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    y = torch.randn(batch, queries, heads, value_width, generator=generator, dtype=torch.float64).to(dtype)
    return q, k + 0.5, v, y  # keys have a mean


def formula(q, k, v, spec, mask=None, kept=None):
    """(softmax(scale · Q Kᵀ + mask) ∘ D) V, with all scores at once; shape (B, h, Tq, dv)."""
    group = q.shape[1] // k.shape[1]
    scores = spec.scale * q @ k.repeat_interleave(group, 1).transpose(-1, -2)
    if spec.is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    scores = scores if mask is None else scores + additive(mask, scores.dtype)
    p = torch._safe_softmax(scores, -1)  # 0 for a query that sees no key
    return (p if kept is None else p * kept / (1 - spec.p)) @ v.repeat_interleave(group, 1)


def formula_gradients(q, k, v, y, spec, mask=None, kept=None):
    """Its gradients by autograd, shapes (B, T, h, d)."""
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    output = formula(*inputs, spec, mask, kept)
    found = torch.autograd.grad(output, inputs, y.transpose(1, 2))
    return [gradient.transpose(1, 2) for gradient in found]


def spec_of(q, k, **named):
    return AttentionSpec(k.shape[2], k.shape[1], k.shape[3], named.pop("scale", k.shape[3] ** -0.5), **named)


def exact_rows(q, k, v, index=None, kv_index=None):
    """What would be packed, as functions that return some rows of it."""
    parts = attention_rows(q, k, v, index, kv_index)
    return tuple(lambda begin, end, part=part: part[begin:end] for part in parts)


def packed_kept(kept, index=None):
    """The bits of a mask of dropout of shape (B, h, Tq, Tk)."""
    return pack_mask(kept.flatten(0, 2), score_rows(index, kept.shape[1], kept.shape[2]))


def relative(found, exact):
    """‖found − exact‖² / ‖exact‖² over several tensors."""
    pairs = list(zip(found, exact, strict=True))
    error = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return error / sum(float(b.double().square().sum()) for _, b in pairs)
