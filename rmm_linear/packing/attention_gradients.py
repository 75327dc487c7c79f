"""The gradients of scaled-dot-product attention in blocks of scores, see :mod:`rmm_linear.packing.attention`.

A few sequences are handled at a time, or one sequence, or some of its heads, or some of their queries: as many as make
one block of scores. A block has all keys that its queries can see, so its softmax is complete and needs nothing of
other blocks. Queries, keys and values are unpacked for these sequences only.

Masks are added to the scores, and biases, which may need a gradient, as relative positions do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rmm_linear.packing.attention import AttentionSpec, additive, block_size, score_rows
from rmm_linear.packing.masks import apply_mask

Rows = Callable[[int, int], Tensor]


def softmax_gradients(scores: Tensor, dp: Tensor) -> None:
    """Compute P and dS from scores and dP, 0 for queries that see no key.

    scores: S, shape (…, Tk), contiguous; overwritten with P. dp: dP, the same shape, contiguous; overwritten with dS.
    """
    p = torch.ops.aten._safe_softmax(scores, -1)
    scores.copy_(p)
    dp.mul_(p)
    dp.addcmul_(p, dp.sum(-1, keepdim=True), value=-1)


@dataclass(frozen=True)
class Steps:
    """The steps between the products of a block."""

    softmax_gradients: Callable[[Tensor, Tensor], None] = softmax_gradients  # softmax_gradients, or a faster one
    # Multiplies by dropout's bits: packing.masks.apply_mask, or a faster one
    apply_mask: Callable[[Tensor, Tensor, float], Tensor] = apply_mask


def attention_gradients(
    grad_output: Tensor,
    rows: tuple[Rows, Rows, Rows],
    spec: AttentionSpec,
    mask: Tensor | None = None,
    kept: Tensor | None = None,
    index: Tensor | None = None,
    kv_index: Tensor | None = None,
    *,
    bias: Bias | None = None,
    steps: Steps | None = None,
    block: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to queries, keys and values: (B, Tq, h, d), (B, Tk, hk, d), (B, Tk, hk, dv).

    Tokens that have no row get 0.

    Args:
        grad_output: dO, shape (B, Tq, h, dv).
        rows: Functions of ``begin`` and ``end`` that return the rows begin … end − 1 of what
            :func:`~rmm_linear.packing.attention.attention_rows` returns: queries, keys, values.
        spec: The attention.
        mask: Bool or additive, shape (B or 1, h or 1, Tq, Tk), or None.
        kept: Which scores dropout kept, one bit each, as :func:`rmm_linear.packing.masks.pack_mask` stores the rows
            :func:`~rmm_linear.packing.attention.score_rows` of (B · h · Tq, Tk); None without dropout.
        index: Tokens of the rows of queries, ascending; None for all.
        kv_index: Tokens of the rows of keys and values, likewise.
        bias: Added to the scores, or None.
        steps: Faster functions for the steps between the products; None for those in plain PyTorch.
        block: Scores at a time; None for what suits the device.
    """
    batch, queries, heads, value_width = grad_output.shape
    block = block or block_size(grad_output.device)
    shapes = (
        (queries, heads, spec.width),
        (spec.keys, spec.kv_heads, spec.width),
        (spec.keys, spec.kv_heads, value_width),
    )
    # All is written where every token has a row, and every key a query that sees it.
    is_written = index is None and kv_index is None and not spec.is_causal
    found = [(grad_output.new_empty if is_written else grad_output.new_zeros)(batch, *shape) for shape in shapes]
    flat, wide = grad_output.flatten(0, 1), torch.promote_types(grad_output.dtype, torch.float32)
    together = max(1, block // max(1, heads * queries * spec.keys))
    of_scores = score_rows(index, heads, queries)
    for (begin, ours), (_, theirs) in zip(
        _spans(index, batch, queries, together), _spans(kv_index, batch, spec.keys, together), strict=True
    ):
        if not (ours.count and theirs.count):
            continue
        count = min(together, batch - begin)
        y = ours.place(flat[ours.tokens].to(wide), count, (heads, value_width))
        q, k, v = (
            at.place(row(at.first, at.first + at.count).to(wide), count, size[1:])
            for row, at, size in zip(rows, (ours, theirs, theirs), shapes, strict=True)
        )
        places = slice(begin, begin + count)
        part = None if mask is None else part_of(mask, places, ours.columns, theirs.columns)
        own = None if bias is None else bias.of(places, ours.columns, theirs.columns)
        bits = None if kept is None else _bits(kept, of_scores, ours, begin, (count, heads, queries))
        added = Added(part, own, wide)
        one = _Sequences(y, q * spec.scale, k, v, added, bits, spec, ours.columns, theirs.columns, steps or Steps())
        targets = (whole[places, at.columns] for whole, at in zip(found, (ours, theirs, theirs), strict=True))
        one.gradients(block, *targets)
    dq, dk, dv = found
    return dq, dk, dv


@dataclass(frozen=True)
class _Span:
    """Rows of some sequences, the columns of these sequences that they lie in, and their places among those."""

    first: int
    count: int
    columns: slice
    tokens: Tensor | slice
    places: Tensor | None  # None: all places, in order

    def place(self, rows: Tensor, sequences: int, shape: tuple[int, int]) -> Tensor:
        """Return the rows (n, …) at their places, shape (sequences, columns, *shape), and 0 at the others."""
        width = self.columns.stop - self.columns.start
        if self.places is not None:
            rows = rows.new_zeros(sequences * width, *rows.shape[1:]).index_copy_(0, self.places, rows)
        return rows.reshape(sequences, width, *shape)


def _spans(index: Tensor | None, batch: int, tokens: int, together: int) -> Iterator[tuple[int, _Span]]:
    """Yield the first of every few sequences, and their rows."""
    starts = [sequence * tokens for sequence in range(0, batch, together)]
    ends = [min(start + together * tokens, batch * tokens) for start in starts]
    if index is None:
        for start, end in zip(starts, ends, strict=True):
            yield start // max(1, tokens), _Span(start, end - start, slice(0, tokens), slice(start, end), None)
        return
    edges = torch.searchsorted(index, torch.tensor([*starts, batch * tokens], device=index.device)).tolist()
    for start, first, end in zip(starts, edges[:-1], edges[1:], strict=True):
        sequence, own = start // max(1, tokens), index[first:end]
        place = own % tokens
        low, high = (int(place.min()), int(place.max()) + 1) if len(own) else (0, 0)
        places = (own // tokens - sequence) * (high - low) + place - low
        yield sequence, _Span(first, end - first, slice(low, high), own, places)


def _bits(kept: Tensor, of_scores: Tensor | None, span: _Span, begin: int, shape: tuple[int, int, int]) -> Tensor:
    """Return the bits of some sequences, shape (sequences, h, columns of the span, bytes)."""
    sequences, heads, queries = shape
    first = begin * heads * queries
    if of_scores is None:
        found = kept[first : first + sequences * heads * queries]
    else:
        own = slice(span.first * heads, (span.first + span.count) * heads)
        found = kept.new_zeros(sequences * heads * queries, kept.shape[1])
        found.index_copy_(0, of_scores[own] - first, kept[own])
    return found.view(sequences, heads, queries, -1)[:, :, span.columns]


@dataclass(frozen=True)
class _Sequences:
    """Some sequences, all of whose tokens lie in the same columns; shapes (sequences, columns, heads, features)."""

    y: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    added: Added
    bits: Tensor | None
    spec: AttentionSpec
    rows: slice
    columns: slice
    steps: Steps

    def gradients(self, block: int, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Write the gradients, of the shapes of q, k and v."""
        (count, queries, heads, _), keys = self.q.shape, self.k.shape[1]
        group = heads // self.spec.kv_heads
        step = max(1, block // max(1, count * group * queries * keys))  # heads of keys at a time
        rows = min(queries, max(1, block // max(1, count * group * keys)))
        if self.spec.is_causal:  # short blocks, so that scores which are not seen are mostly not made
            rows = min(rows, max(64, queries // 4))
        for first in range(0, self.spec.kv_heads, step):
            own = slice(first, min(first + step, self.spec.kv_heads))
            head = slice(own.start * group, own.stop * group)
            k, v = (_by_head(tensor[:, :, own], 1) for tensor in (self.k, self.v))
            sums = None
            for end in range(queries, 0, -rows):
                place = slice(max(0, end - rows), end)
                seen = min(keys, end + self.rows.start - self.columns.start) if self.spec.is_causal else keys
                if seen <= 0:
                    dq[:, place, head] = 0
                    continue
                q, y = (_by_head(tensor[:, place, head], group) for tensor in (self.q, self.y))
                dropped, ds = self._scores(q, y, k[:, :seen], v[:, :seen], head, place)
                self.added.add_gradient(ds.view(count, -1, place.stop - place.start, seen), head, place)
                product = torch.bmm(ds, k[:, :seen]).mul_(self.spec.scale)
                dq[:, place, head] = _by_token(product, count, group)
                pairs = (ds.transpose(1, 2), q), (dropped.transpose(1, 2), y)
                if sums is None:  # the last queries, which see the most keys
                    sums = [torch.bmm(*pair) for pair in pairs]
                else:
                    for one, pair in zip(sums, pairs, strict=True):
                        one[:, :seen].baddbmm_(*pair)
            for whole, one in zip((dk, dv), sums or (), strict=False):
                whole[:, : one.shape[1], own] = _by_token(one, count, 1)

    def _scores(self, q: Tensor, y: Tensor, k: Tensor, v: Tensor, head: slice, place: slice) -> tuple[Tensor, Tensor]:
        """P ∘ D and dS of a block, shape (sequences · heads of keys, group · queries, keys)."""
        scores = torch.bmm(q, k.transpose(1, 2))  # the queries are scaled
        shape = (self.q.shape[0], head.stop - head.start, place.stop - place.start, k.shape[1])
        by_query = scores.view(shape)
        if self.added.values is not None:
            by_query.add_(block_of(self.added.values, head, place, k.shape[1]))
        if self.spec.is_causal:
            first = self.rows.start + place.start - self.columns.start
            begin = min(max(0, first + 1), shape[3])  # keys that not all of these queries see
            hidden = torch.ones(shape[2], shape[3] - begin, dtype=torch.bool, device=k.device).triu(first + 1 - begin)
            by_query[..., begin:].masked_fill_(hidden, -torch.inf)
        p, ds = scores, torch.bmm(y, v.transpose(1, 2))
        if self.bits is None:
            self.steps.softmax_gradients(p, ds)
            return p, ds
        bits = self.bits[:, head, place].reshape(-1, self.bits.shape[-1])
        ds = self._drop(ds.view(len(bits), -1), bits).view_as(p)
        self.steps.softmax_gradients(p, ds)
        return self._drop(p.view(len(bits), -1), bits).view_as(p), ds

    def _drop(self, values: Tensor, bits: Tensor) -> Tensor:
        """Return the rows of scores times D, of which the bits hold all Tk columns."""
        if values.shape[1] == self.spec.keys:
            return self.steps.apply_mask(values, bits, self.spec.kept_scale)
        whole = values.new_zeros(len(values), self.spec.keys)
        place = slice(self.columns.start, self.columns.start + values.shape[1])
        whole[:, place] = values
        return self.steps.apply_mask(whole, bits, self.spec.kept_scale)[:, place].contiguous()


def _by_head(tensor: Tensor, group: int) -> Tensor:
    """(sequences, columns, heads, features) to (sequences · heads / group, group · columns, features)."""
    sequences, columns, heads, features = tensor.shape  # a view of one sequence stays one
    return tensor.transpose(1, 2).reshape(sequences * heads // group, group * columns, features)


def _by_token(tensor: Tensor, count: int, group: int) -> Tensor:
    """Return the inverse of :func:`_by_head` for ``count`` sequences."""
    heads, columns, features = tensor.shape
    return tensor.view(count, heads // count * group, columns // group, features).transpose(1, 2)


def biased(mask: Tensor | None, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias of scores and a mask as numbers that are added to scores, as transformers puts them together.

    mask: Bool, true where a query sees a key, or additive, or None. bias: Broadcasts with the mask. Where a bool mask
    is false, the sum is the lowest number of the bias's dtype.
    """
    if mask is None:
        return bias.to(dtype)
    if mask.dtype != torch.bool:
        return bias.to(dtype) + mask.to(dtype)
    return torch.where(mask, bias.to(dtype), torch.finfo(bias.dtype).min)


@dataclass(frozen=True)
class Bias:
    """A bias that is added to the scores in addition to the mask."""

    values: Tensor  # shape (B or 1, h or 1, Tq, Tk)
    gradient: Tensor | None = None  # its gradient is added here, float32 at least; None if it needs none

    def of(self, places: slice, rows: slice, columns: slice) -> Bias:
        """Return the part for some sequences, queries and keys."""
        parts = (None if one is None else part_of(one, places, rows, columns) for one in (self.values, self.gradient))
        return Bias(*parts)  # pyright: ignore[reportArgumentType]

    def add_gradient(self, ds: Tensor, mask: Tensor | None, head: slice, rows: slice) -> None:
        """Add dS of a block, shape (sequences, heads, queries, keys), where a bool mask is true."""
        if self.gradient is None:
            return
        whole = block_of(self.gradient, head, rows, ds.shape[-1])
        if mask is not None and mask.dtype == torch.bool:
            ds = ds * block_of(mask, head, rows, ds.shape[-1])
        whole.add_(ds.sum_to_size(whole.shape))


def part_of(tensor: Tensor, places: slice, rows: slice, columns: slice) -> Tensor:
    """Return a mask or bias, shape (B or 1, h or 1, Tq, Tk), of some sequences, queries and keys."""
    return tensor[places if tensor.shape[0] > 1 else slice(None), :, rows, columns]


def block_of(tensor: Tensor, head: slice, rows: slice, seen: int) -> Tensor:
    """Return a part of it for some heads and queries and the first keys."""
    return tensor[:, head if tensor.shape[1] > 1 else slice(None), rows, :seen]


class Added:
    """Return mask and bias of some sequences' scores, shape (sequences or 1, h or 1, queries, keys)."""

    def __init__(self, mask: Tensor | None, bias: Bias | None, dtype: torch.dtype) -> None:
        """Put mask and bias together, in the dtype of the scores."""
        self.mask, self.bias, self.values = mask, bias, None
        if bias is not None:
            self.values = biased(mask, bias.values, dtype)
        elif mask is not None:
            self.values = additive(mask, dtype)

    def add_gradient(self, ds: Tensor, head: slice, rows: slice) -> None:
        if self.bias is not None:
            self.bias.add_gradient(ds, self.mask, head, rows)
