"""Queries, keys and values of an attention, packed, and the operators that pack them and compute the gradients.

The mathematics is in :mod:`rmm_linear.packing.attention`. The blocks of scores are PyTorch's matrix products on every
backend: on CPU they take most of the time, and no loop of ours is faster than its BLAS. The C library packs, unpacks,
and makes softmax and its gradient in one pass between the products. On CUDA, the fused kernels of PyTorch compute the
gradients (``fused_attention.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from rmm_linear import packing
from rmm_linear.backends.native import attention as native_attention
from rmm_linear.backends.native import masks as native_masks
from rmm_linear.backends.native.library import TYPES
from rmm_linear.ops import native
from rmm_linear.ops.fused_attention import fused_gradients
from rmm_linear.ops.operator import operator
from rmm_linear.ops.stored import Part, empty_stored, fill_seeds, views
from rmm_linear.ops.table import PACK, UNPACK, Operation
from rmm_linear.packing import GROUP
from rmm_linear.packing import attention as plain
from rmm_linear.packing import attention_gradients as blocks
from rmm_linear.packing import masks as plain_masks
from rmm_linear.packing.attention import AttentionSpec
from rmm_linear.packing.attention_bias import Bias
from rmm_linear.packing.attention_gradients import Rows, Steps, attention_gradients

Bits = tuple[int, int, int]  # of queries, keys and values
_SEEDS: Part = ((3,), torch.int64)  # of the rounding of each


def attention_parts(rows: int, kv_rows: int, columns: tuple[int, ...], bits: Bits) -> list[Part]:
    """Return the parts of what is saved: seeds, then codes and qparams of queries, keys and values.

    Args:
        rows: Tokens whose queries are packed.
        kv_rows: Tokens whose keys and values are packed.
        columns: h · d, hk · d and hk · dv.
        bits: Bits of queries, keys and values.

    Returns:
        Shapes and dtypes.
    """
    parts = [_SEEDS]
    for count, width, one in zip((rows, kv_rows, kv_rows), columns, bits, strict=True):
        parts.append(((count, (width * one + 7) // 8), torch.uint8))
        parts.append(((count, (width + GROUP - 1) // GROUP, 2), torch.bfloat16))
    return parts


def _parts(query: Tensor, key: Tensor, value: Tensor, index: Tensor | None, kv_index: Tensor | None, bits: Bits):
    """The parts for tensors of these shapes; an index leaves rows out."""
    rows, kv_rows = (
        one.shape[0] * one.shape[2] if at is None else at.shape[0] for one, at in ((query, index), (key, kv_index))
    )
    columns = tuple(one.shape[1] * one.shape[3] for one in (query, key, value))
    return attention_parts(rows, kv_rows, columns, bits)


@operator("pack_attention")
def pack_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor | None,
    kv_index: Tensor | None,
    seed: int | None,
    bits_q: int,
    bits_k: int,
    bits_v: int,
) -> Tensor:
    """Pack queries, keys less their mean over the sequence, and values.

    Args:
        query: Shape (B, h, Tq, d).
        key: Shape (B, hk, Tk, d).
        value: Shape (B, hk, Tk, dv).
        index: Tokens whose queries are packed, int64, shape (n,), ascending, of B · Tq; None for all.
        kv_index: Tokens whose keys and values are packed, likewise of B · Tk.
        seed: Seed of the rounding; None draws one.
        bits_q: Bits of queries.
        bits_k: Bits of keys.
        bits_v: Bits of values.

    Returns:
        The bytes of :func:`attention_parts`.
    """
    bits = bits_q, bits_k, bits_v
    parts = _parts(query, key, value, index, kv_index, bits)
    stored = empty_stored(query, parts).zero_()  # between the parts as well: the same bytes for the same seed
    seeds, *places = views(stored, parts)
    fill_seeds(seeds, seed)
    for i, rows in enumerate(plain.attention_rows(query, key, value, index, kv_index)):
        for place, made in zip(places[2 * i : 2 * i + 2], PACK(rows, bits[i], seeds[i : i + 1]), strict=True):
            place.copy_(made)
    return stored


@pack_attention.register_fake
def _(query, key, value, index, kv_index, seed, bits_q, bits_k, bits_v):
    return empty_stored(query, _parts(query, key, value, index, kv_index, (bits_q, bits_k, bits_v)))


def _plain_rows(*stored: Tensor, bits: int, columns: int, dtype: torch.dtype) -> Rows:
    codes, qparams, seed = stored
    parts = packing.unpack_parts(codes, qparams, seed, bits, columns, dtype)
    return lambda begin, end: packing.unrotate(parts(begin, end), seed)


def _native_rows(*stored: Tensor, bits: int, columns: int, dtype: torch.dtype) -> Rows:
    codes, qparams, seed = stored
    return native.unpacked_rows(codes, qparams, seed, bits, columns, dtype)


def _unpacked_rows(*stored: Tensor, bits: int, columns: int, dtype: torch.dtype) -> Rows:
    matrix = UNPACK(*stored, bits, columns, dtype)
    return lambda begin, end: matrix[begin:end]


def _apply_natively(y: Tensor, bits: Tensor, scale: float) -> Tensor:
    return (native_masks if y.dtype in TYPES else plain_masks).apply_mask(y, bits, scale)


def _softmax_natively(scores: Tensor, dp: Tensor) -> None:
    (native_attention if scores.dtype == torch.float32 else blocks).softmax_gradients(scores, dp)


def _gradients(make: Callable[..., Rows], steps: Steps) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The gradients with a function that makes those that unpack rows."""

    def run(
        grad_output: Tensor,
        stored: Tensor,
        mask: Tensor | None,
        kept: Tensor | None,
        index: Tensor | None,
        kv_index: Tensor | None,
        *,
        spec: AttentionSpec,
        bits: Bits,
        bias: Bias | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, queries, heads, value_width = grad_output.shape
        columns = heads * spec.width, spec.kv_heads * spec.width, spec.kv_heads * value_width
        counts = (
            (batch * queries if index is None else len(index)),
            (batch * spec.keys if kv_index is None else len(kv_index)),
        )
        seeds, *parts = views(stored, attention_parts(*counts, columns, bits))
        on_gpu = grad_output.device.type == "cuda"
        wide = torch.promote_types(grad_output.dtype, torch.float32)
        query, key, value = (
            make(
                *parts[2 * i : 2 * i + 2], seeds[i : i + 1], bits=bits[i], columns=columns[i],
                dtype=grad_output.dtype if on_gpu else wide,
            )
            for i in range(3)
        )  # fmt: skip
        rows = query, key, value
        if on_gpu and kept is None and bias is None:
            whole = query(0, counts[0]), key(0, counts[1]), value(0, counts[1])
            found = fused_gradients(grad_output, whole, spec, mask, index, kv_index)
            if found is not None:
                return found
        return attention_gradients(grad_output, rows, spec, mask, kept, index, kv_index, bias=bias, steps=steps)

    return run


ATTENTION_BACKWARD = Operation(
    _gradients(_plain_rows, Steps()),
    _gradients(_native_rows, Steps(_softmax_natively, _apply_natively)),
    _gradients(_unpacked_rows, Steps()),
)


@operator("attention_backward")
def attention_backward(
    grad_output: Tensor,
    stored: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients with respect to queries, keys and values from their packed copies.

    Args:
        grad_output: dO, shape (B, Tq, h, dv).
        stored: Result of :func:`pack_attention`.
        mask: Bool or additive, shape (B or 1, h or 1, Tq, Tk), or None.
        kept: Bits of dropout, see :func:`rmm_linear.packing.attention_gradients.attention_gradients`, or None.
        index: That of :func:`pack_attention`.
        kv_index: That of :func:`pack_attention`.
        keys: See :class:`rmm_linear.packing.attention.AttentionSpec`, as the following ones.
        kv_heads: Heads of keys and values.
        width: d.
        scale: Factor of the scores.
        is_causal: Whether query i sees the keys 0 … i only.
        p: Probability of dropout.
        bits_q: That of :func:`pack_attention`.
        bits_k: That of :func:`pack_attention`.
        bits_v: That of :func:`pack_attention`.

    Returns:
        Shapes (B, Tq, h, d), (B, Tk, hk, d) and (B, Tk, hk, dv), dtype of ``grad_output``, contiguous.
    """
    spec = AttentionSpec(keys, kv_heads, width, scale, is_causal, p)
    dq, dk, dv = ATTENTION_BACKWARD(
        grad_output, stored, mask, kept, index, kv_index, spec=spec, bits=(bits_q, bits_k, bits_v)
    )
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@attention_backward.register_fake
def _(grad_output, stored, mask, kept, index, kv_index, keys, kv_heads, width, *named):
    batch, queries, heads, value_width = grad_output.shape
    return (
        grad_output.new_empty(batch, queries, heads, width),
        grad_output.new_empty(batch, keys, kv_heads, width),
        grad_output.new_empty(batch, keys, kv_heads, value_width),
    )


@operator("dropped_attention")
def dropped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kept: Tensor,
    scale: float,
    is_causal: bool,
    p: float,
) -> Tensor:
    """Return the output of attention with a known mask of dropout.

    Args:
        query: See :func:`rmm_linear.packing.attention.dropped_attention`, as the following ones.
        key: Shape (B, hk, Tk, d).
        value: Shape (B, hk, Tk, dv).
        mask: Bool or additive, or None.
        kept: Which scores dropout keeps, bool, shape (B, h, Tq, Tk).
        scale: Factor of the scores.
        is_causal: Whether query i sees the keys 0 … i only.
        p: Probability of dropout.

    Returns:
        Shape (B, Tq, h, dv).
    """
    spec = AttentionSpec(key.shape[2], key.shape[1], key.shape[3], scale, is_causal, p)
    return plain.dropped_attention(query, key, value, mask, kept, spec)


@dropped_attention.register_fake
def _(query, key, value, mask, kept, scale, is_causal, p):
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


@register_flop_formula(torch.ops.rmm_linear.pack_attention)
def _(query, key, value, *arguments, out_shape=None, **named) -> int:
    return 2 * GROUP * (math.prod(query) + math.prod(key) + math.prod(value))


@register_flop_formula(torch.ops.rmm_linear.attention_backward)
def _backward_flops(grad_output, stored, mask, kept, index, kv_index, keys, kv_heads, width, *arguments, **named):
    batch, queries, heads, value_width = grad_output
    products = 3 * width + 2 * value_width  # scores, dQ and dK; dP and dV
    return 2 * batch * heads * queries * keys * products + 2 * GROUP * batch * queries * heads * width * 3


@register_flop_formula(torch.ops.rmm_linear.dropped_attention)
def _(query, key, value, *arguments, out_shape=None, **named) -> int:
    return 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3])
