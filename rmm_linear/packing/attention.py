"""Scaled-dot-product attention: the tensors that are saved, and its forward pass with dropout, in plain PyTorch.

    S = scale · Q Kᵀ + mask        P = softmax(S)        O = (P ∘ D) V

for every head, where D is dropout's: 0, or 1 / (1 − p) for the scores that are kept. The backward pass needs Q, K, V
and D only, since P follows from them, and with dP = (dO Vᵀ) ∘ D, δ = rowsum(P ∘ dP) = rowsum(dO ∘ O) needs no O:

    dV = (P ∘ D)ᵀ dO        dS = P ∘ (dP − δ)        dQ = scale · dS K        dK = scale · dSᵀ Q

So Q, K and V are packed, one row for each token, all heads side by side, and O is not saved at all. The keys are packed
less their mean over the sequence, which makes their range smaller: it adds one number to all scores of a query, which
softmax does not see, and dQ does not see it either, because the rows of dS sum to 0. Any number that is the same for
all keys of a sequence and head would do, so padding may have a part in the mean.

What is random: the errors of the packed Q, K and V are independent and have the mean 0. V enters linearly, so its error
leaves all gradients unbiased at any width. Those of Q and K pass through softmax, which makes the only bias of a packed
operation. It grows with the size of the scores: at 4 bits, bias² is below 0.001 of the variance for scores with a
deviation of 1, 0.012 at 2.3, 0.07 at 4 (normal Q and K, d = 64); at 8 bits below 0.001 for all. At 2 bits it is
0.016 in a whole small model, where 4 bits have 0.0005, so 2 bits are refused.
``rmm_linear.variance.standins.attention.simulate_attention`` measures it on one's own data.

Padding: a query of padding has dO = 0, so nothing depends on it, and it leaves what is packed. Its key and value leave
too if the mask hides them from every valid query, as :func:`hides_padding` says; keys that a valid query sees matter,
padding or not, and stay. Without a mask, all keys are seen.

A NaN: groups of 64 columns are rotated and packed together, so a NaN of one head makes the group NaN, and reaches the
gradients of all heads that have columns in it. Those of 64 features, or a multiple of 64, have groups of their own.

Memory: 3 · (bits / 8 + 1/64) bytes for each element of Q, K, V, and ⌈T/8⌉ bytes for each row of scores with dropout;
on CUDA 17 bytes in their place, see :mod:`rmm_linear.ops.fused_attention`.
Time of the backward pass: five products of the size of Q Kᵀ, as for every attention that does not save P.

Source: Dao et al. 2022 (FlashAttention), arXiv 2205.14135, section 3, for the recomputed P and for δ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rmm_linear.packing.pack import packed_parts
from rmm_linear.packing.stored import Part

ATTENTION_WIDTHS = (8, 4)
Bits = tuple[int, int, int]  # of queries, keys and values
SEEDS: Part = ((3,), torch.int64)  # of the rounding of each
_BLOCK = 1 << 18  # scores that a thread has at a time on CPU: they fit into its cache, and outweigh the overhead


@dataclass(frozen=True)
class AttentionSpec:
    """How an attention computes its output."""

    keys: int  # keys per sequence, Tk
    kv_heads: int  # heads of keys and values; each serves the same number of heads of queries
    width: int  # features of a head of queries and keys, d
    scale: float  # factor of the scores
    is_causal: bool = False
    p: float = 0.0  # probability of dropout

    @property
    def kept_scale(self) -> float:
        """The factor of a probability that dropout keeps; 0 if it keeps none."""
        return 1 / (1 - self.p) if self.p < 1 else 0.0


def check_attention_bits(bits: object) -> None:
    """Refuse a width that queries, keys and values should not be packed to."""
    if type(bits) is not int or bits not in ATTENTION_WIDTHS:
        raise ValueError(
            f"attention_bits must be 8 or 4, got {bits!r}. Fewer bits bias the gradient: queries and keys pass through "
            "softmax, and at 2 bits the bias is no longer small compared with the noise. Leave attention exact instead."
        )


def attention_rows(
    query: Tensor, key: Tensor, value: Tensor, index: Tensor | None = None, kv_index: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows that are packed: queries (n, h · d), keys (nk, hk · d) less their mean, values (nk, hk · dv).

    query: (B, h, Tq, d). key: (B, hk, Tk, d). value: (B, hk, Tk, dv). index: Tokens whose queries are packed, int64,
    shape (n,), ascending, of B · Tq; None for all. kv_index: The same of keys and values, of B · Tk.
    """
    places = ((query, index, None), (key, kv_index, key_mean(key)), (value, kv_index, None))
    rows, keys, values = (tokens_of(heads_together(tensor), at, mean) for tensor, at, mean in places)
    return rows, keys, values


def key_mean(key: Tensor) -> Tensor:
    """Return the mean of every sequence's keys, all heads side by side: (B, hk, Tk, d) to (B, hk · d)."""
    return key.mean(2).flatten(1)


def tokens_of(matrix: Tensor, index: Tensor | None, mean: Tensor | None) -> Tensor:
    """Return the rows of an index, None for all, less the mean of their sequence, shape (B, columns), None for 0."""
    if mean is not None and matrix.numel():
        matrix = (matrix.unflatten(0, (mean.shape[0], -1)) - mean.unsqueeze(1)).flatten(0, 1)
    return matrix if index is None else matrix.index_select(0, index)


def heads_together(tensor: Tensor) -> Tensor:
    """Return all heads of a token side by side: (B, h, T, d) to (B · T, h · d)."""
    batch, heads, tokens, width = tensor.shape
    return tensor.transpose(1, 2).reshape(batch * tokens, heads * width)


def attention_parts(rows: int, kv_rows: int, columns: tuple[int, ...], bits: Bits) -> list[Part]:
    """Return the parts that are saved: seeds, then codes and scales of queries, keys and values."""
    parts = [SEEDS]
    for count, width, one in zip((rows, kv_rows, kv_rows), columns, bits, strict=True):
        parts += packed_parts(count, width, one)
    return parts


def parts_of(
    query: Tensor, key: Tensor, value: Tensor, index: Tensor | None, kv_index: Tensor | None, bits: Bits
) -> list[Part]:
    """Return the parts for tensors of these shapes; an index leaves rows out."""
    rows, kv_rows = (
        one.shape[0] * one.shape[2] if at is None else at.shape[0] for one, at in ((query, index), (key, kv_index))
    )
    columns = tuple(one.shape[1] * one.shape[3] for one in (query, key, value))
    return attention_parts(rows, kv_rows, columns, bits)


def hides_padding(valid: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Say whether no valid query sees the key of a padded token.

    valid: Which tokens are not padding, bool, shape (B, T). mask: Bool (true where a query sees a key) or additive,
    shape (B or 1, h or 1, T, T); None for none.
    """
    if mask is None:  # seen by any valid query, or by one that is not before the key
        seen = valid.flip(1).cummax(1).values.flip(1) if is_causal else valid.any(1, keepdim=True)
        return ~(seen & ~valid).any()
    # An additive mask hides by a number so low that softmax gives 0 next to any other score.
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return ~(seen.any(1) & valid.unsqueeze(2) & ~valid.unsqueeze(1)).any()


def score_rows(index: Tensor | None, heads: int, queries: int) -> Tensor | None:
    """Return the rows of all scores, (B · h · Tq, Tk), that belong to some tokens: the masks that dropout saves.

    index: Tokens, int64, shape (n,), of B · Tq; None for all. Returns int64, shape (n · h,), token after token; None
    for all rows, which are in another order.
    """
    if index is None:
        return None
    sequence, place = (index // queries).unsqueeze(1), (index % queries).unsqueeze(1)
    return ((sequence * heads + torch.arange(heads, device=index.device)) * queries + place).flatten()


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as numbers that are added to scores: −∞ where it is false."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def block_size(device: torch.device) -> int:
    """Return how many scores are made at a time; on CPU, as many as fit into the caches of all threads."""
    return _BLOCK * torch.get_num_threads() if device.type == "cpu" else _BLOCK << 8


def dropped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kept: Tensor, spec: AttentionSpec
) -> Tensor:
    """Return the output with a known mask of dropout, as ``F.scaled_dot_product_attention`` does up to rounding.

    query: (B, h, Tq, d). key: (B, hk, Tk, d). value: (B, hk, Tk, dv). mask: Bool or additive, (B or 1, h or 1, Tq, Tk),
    or None. kept: The scores that dropout keeps, bool, (B, h, Tq, Tk).
    """
    batch, heads, queries, _ = query.shape
    bias = _visible(query, mask, spec, torch.promote_types(query.dtype, torch.float32))
    scores_each, group = max(1, queries * spec.keys), heads // spec.kv_heads
    step = max(1, block_size(query.device) // scores_each)  # heads at a time, of one sequence or of a few
    together = max(1, step // heads)
    if together >= batch and step >= heads and group == 1:
        output = _dropped(query, key, value, bias, kept, spec).transpose(1, 2)
        return output.to(query.dtype).contiguous()
    output = query.new_empty(batch, queries, heads, value.shape[-1])
    for first in range(0, batch, together):
        some = slice(first, min(first + together, batch))
        for begin in range(0, heads, step):
            head = slice(begin, min(begin + step, heads))
            k, v = (_of_heads(tensor[some], head, group) for tensor in (key, value))
            own = None if bias is None else bias if len(bias) == 1 else bias[some]
            own = own if own is None or own.shape[1] == 1 else own[:, head]
            output[some, :, head] = _dropped(query[some, head], k, v, own, kept[some, head], spec).transpose(1, 2)
    return output


def _dropped(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, kept: Tensor, spec: AttentionSpec
) -> Tensor:
    """Return the output of some heads, in their order, in float32 at least."""
    wide = torch.promote_types(query.dtype, torch.float32)
    # PyTorch, too, multiplies queries and keys by the root of the scale: the same numbers, to the last bit mostly.
    root = math.sqrt(abs(spec.scale))
    scores = (query.to(wide) * math.copysign(root, spec.scale)) @ (key.to(wide) * root).transpose(-1, -2)
    p = torch.ops.aten._safe_softmax(scores if bias is None else scores.add_(bias), -1)  # 0 where nothing is seen
    return p.mul_(kept.to(wide).div_(1 - spec.p)) @ value.to(wide)


def _of_heads(tensor: Tensor, head: slice, group: int) -> Tensor:
    """The keys or values that some heads of queries see, each once for every head: (B, hk, T, d) to (B, n, T, d)."""
    if group == 1:
        return tensor[:, head]
    return tensor.index_select(1, torch.arange(head.start, head.stop, device=tensor.device) // group)


def _visible(query: Tensor, mask: Tensor | None, spec: AttentionSpec, dtype: torch.dtype) -> Tensor | None:
    if spec.is_causal:
        mask = query.new_ones(1, 1, query.shape[2], spec.keys, dtype=torch.bool).tril()
    return None if mask is None else additive(mask, dtype)
