"""The gradients of attention with the C library: rows are unpacked, and softmax is made between the products, in C."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rmm_linear.backends import native
from rmm_linear.backends.native.library import function, pointer, read_seed, threads, write_seeds
from rmm_linear.ops.native.masks import apply_mask
from rmm_linear.ops.native.sketches import unpacked_rows
from rmm_linear.packing.attention import (
    AttentionSpec,
    Bits,
    additive,
    attention_parts,
    attention_rows,
    block_size,
)
from rmm_linear.packing.attention_gradients import Rows, Steps
from rmm_linear.packing.stored import new_stored, offsets


def stored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor | None,
    kv_index: Tensor | None,
    seed: int | None,
    bits_q: int,
    bits_k: int,
    bits_v: int,
) -> Any:
    """Return the bytes of :func:`rmm_linear.ops.attention.pack_attention`."""
    rows = attention_rows(query, key, value, index, kv_index)
    bits = bits_q, bits_k, bits_v
    counts = rows[0].shape[0], rows[1].shape[0], tuple(one.shape[1] for one in rows), bits
    (_, *places), size = _layout(*counts)
    stored = new_stored(query, size, places)
    seeds, base = write_seeds(stored, seed, 3), stored.data_ptr()
    for i, matrix in enumerate(rows):
        matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
        at = base + places[2 * i], base + places[2 * i + 1]
        native.pack(matrix, bits[i], seeds[i], *at, matrix.shape[0])
    return stored


@functools.lru_cache(maxsize=4096)
def _layout(rows: int, kv_rows: int, columns: tuple[int, ...], bits: Bits) -> tuple[list[int], int]:
    return offsets(tuple(attention_parts(rows, kv_rows, columns, bits)))


def stored_attention_backward(
    y: Tensor,
    stored: Tensor,
    mask: Tensor | None,
    kept: Tensor | None,
    index: Tensor | None,
    kv_index: Tensor | None,
    spec: AttentionSpec,
    bits: Bits,
    bias: Tensor | None = None,
    needs_bias: bool = False,
) -> Any:
    """Compute what :func:`rmm_linear.ops.attention.attention_backward` does, of all scores at once if they are few."""
    batch, queries, heads, width = y.shape
    keys, group = spec.keys, heads // spec.kv_heads
    is_one_block = batch * heads * queries * keys <= block_size(y.device) and not (spec.is_causal and queries > 64)
    if not is_one_block or bias is not None or index is not None or kv_index is not None or not y.numel() or not keys:
        return NotImplemented
    columns = heads * spec.width, spec.kv_heads * spec.width, spec.kv_heads * width
    places = _layout(batch * queries, batch * keys, columns, bits)[0]
    base, rows = stored.data_ptr(), (batch * queries, batch * keys, batch * keys)
    q, k, v = (y.new_empty(rows[i], columns[i], dtype=torch.float32) for i in range(3))
    for i, matrix in enumerate((q, k, v)):
        at = base + places[2 * i + 1], base + places[2 * i + 2]
        native.unpack(*at, bits[i], read_seed(stored, i), matrix, rotated=False)
    q = _by_head(q.mul_(spec.scale), batch, queries, heads, group)
    k, v = (_by_head(one, batch, keys, spec.kv_heads, 1) for one in (k, v))
    dy = _by_head(y.to(torch.float32), batch, queries, heads, group)
    p, ds = torch.bmm(q, k.transpose(1, 2)), torch.bmm(dy, v.transpose(1, 2))
    if mask is not None:
        p.view(batch, heads, queries, keys).add_(additive(mask, torch.float32))
    if spec.is_causal:
        visible = torch.ones(queries, keys, dtype=torch.bool, device="cpu").tril()
        p.view(batch, heads, queries, keys).masked_fill_(~visible, -torch.inf)
    dropped = p
    if kept is None:
        softmax_gradients(p, ds)
    else:
        ds = apply_mask(ds.view(-1, keys), kept, spec.kept_scale).view_as(p)
        softmax_gradients(p, ds)
        dropped = apply_mask(p.view(-1, keys), kept, spec.kept_scale).view_as(p)
    dq, dk = torch.bmm(ds, k).mul_(spec.scale), torch.bmm(ds.transpose(1, 2), q)
    dv = torch.bmm(dropped.transpose(1, 2), dy)
    found = (dq, heads, queries), (dk, spec.kv_heads, keys), (dv, spec.kv_heads, keys)
    by_token = (one.view(batch, count, tokens, -1).transpose(1, 2).to(y.dtype) for one, count, tokens in found)
    return *by_token, y.new_empty(0, dtype=torch.float32)


def _by_head(rows: Tensor, batch: int, tokens: int, heads: int, group: int) -> Tensor:
    """Rows (batch · tokens, heads · features), or in four dimensions, to (batch · heads / group, group · tokens, …)."""
    by_head = rows.view(batch, tokens, heads, -1) if rows.dim() == 2 else rows
    return by_head.transpose(1, 2).reshape(batch * heads // group, group * tokens, -1)


def softmax_gradients(scores: Tensor, dp: Tensor) -> None:
    """Do what :func:`rmm_linear.packing.attention_gradients.softmax_gradients` does, with contiguous float32."""
    columns = scores.shape[-1]
    rows = scores.numel() // max(1, columns)
    function("rmm_softmax_gradients")(pointer(scores), pointer(dp), rows, columns, threads(scores))


def rows_of(codes: Tensor, scales: Tensor, seed: Tensor, bits: int, columns: int, dtype: torch.dtype) -> Rows:
    """Unpack rows, some at a time; in float32, whatever the dtype."""
    return unpacked_rows(codes, scales, seed, bits, columns, dtype)


def steps_of(dtype: torch.dtype) -> Steps:
    """Return the steps for gradients of a dtype, which are made in float32 at least."""
    return Steps() if dtype == torch.float64 else Steps(softmax_gradients, apply_mask)
