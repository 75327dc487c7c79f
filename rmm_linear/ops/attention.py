"""Queries, keys and values of an attention, packed, and the operators that pack them and compute the gradients.

The mathematics is in :mod:`rmm_linear.packing.attention`. The blocks of scores are PyTorch's matrix products on every
backend: on CPU they take most of the time, and no loop of ours is faster than its BLAS. The C library packs, unpacks,
and makes softmax and its gradient in one pass between the products. The fused kernels of PyTorch compute the output
with dropout and the gradients on CUDA, and gradients of long sequences in bfloat16 on CPUs with tiles for products, see
:mod:`rmm_linear.ops.fused_attention`.

A bias of the scores may need a gradient too, as relative positions do. The scores are S + bias, so it is dS, summed
over what the bias is broadcast along. It is added up while the blocks of scores are made, so it needs no more memory
than the bias itself.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from rmm_linear import packing
from rmm_linear.ops import triton
from rmm_linear.ops.dispatch import FLOATS, Call, Case, call, operation, operator
from rmm_linear.ops.fused_attention import dropped_output, fused_gradients, is_faster_on_cpu, runs_kernels, state_bytes
from rmm_linear.ops.native import attention as native
from rmm_linear.ops.repeat import Repeated
from rmm_linear.ops.sketches import PACK, UNPACK
from rmm_linear.packing import GROUP
from rmm_linear.packing import attention as plain
from rmm_linear.packing import masks as plain_masks
from rmm_linear.packing.attention import AttentionSpec, Bits, attention_parts, parts_of, score_rows
from rmm_linear.packing.attention_gradients import Bias, Rows, Steps, attention_gradients
from rmm_linear.packing.pack import unrotate
from rmm_linear.packing.stored import blank_stored, stored_bytes, views
from rmm_linear.sketches.seeds import each_of, fresh_seeds

logger = logging.getLogger(__name__)


def _tensors(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values, and the gradient with respect to the output: four heads, two for each of keys."""
    batch, width = 1 + (case.rows % 2 == 0), 1 + case.columns // 10
    query, key, value, y = (
        case.matrix(number, heads * features).unflatten(0, (batch, case.rows // batch)).unflatten(2, (heads, features))
        for number, (heads, features) in enumerate(((4, width), (2, width), (2, width + 1), (4, width + 1)))
    )
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), y


def _index(case: Case) -> Tensor | None:
    return None if case.index is None else case.index.sort().values


def _pack_samples(case: Case) -> Iterator[Call]:
    for kv_index, bits in ((_index(case), (4, 4, 4)), (None, (8, 8, 4))):
        yield call(*_tensors(case)[:3], _index(case), kv_index, case.seed, *bits)


def _gradient_samples(case: Case) -> Iterator[Call]:
    """One call without anything else, one that is causal, with a mask, with dropout, and with a bias."""
    query, key, value, y = _tensors(case)
    (batch, heads, queries, width), keys, index = query.shape, key.shape[2], _index(case)
    shape, numbers = (batch, heads, queries, keys), torch.Generator().manual_seed(5)
    mask = torch.rand(batch, 1, queries, keys, generator=numbers) > 0.3
    kept = plain_masks.pack_mask(
        (torch.rand(shape, generator=numbers) > 0.3).flatten(0, 2), score_rows(index, heads, queries)
    )
    for place in range(5):
        bits: Bits = ((4, 4, 4), (8, 8, 4))[place % 2]
        spec = AttentionSpec(keys, key.shape[1], width, 0.3, place == 1, 0.3 if place == 3 else 0.0)
        stored = pack_attention.function(query, key, value, index, index, 7, *bits)
        own = torch.randn(1, *shape[1:], generator=numbers).to(case.dtype) if place == 4 else None
        yield call(y, stored, mask if place == 2 else None, kept if place == 3 else None, index, index, spec, bits, own)


def _row_samples(case: Case) -> Iterator[Call]:
    for (*tensors, spec, bits, own), _ in _gradient_samples(case):
        bias = None if own is None else Bias(own, torch.zeros_like(own, dtype=_wide(own)))
        yield call(*tensors, spec=spec, bits=bits, bias=bias)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _pack_tokens_plainly(
    matrix: Tensor,
    bits: int,
    seed: Tensor,
    index: Tensor | None,
    mean: Tensor | None,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    return PACK(plain.tokens_of(matrix, index, mean), bits, seed, out=out)


def _tokens_samples(case: Case) -> Iterator[Call]:
    for batch in (1, case.rows):
        yield call(case.matrix(), 4, case.seeds, case.index, case.matrix(1)[:batch] if case.rows else None)
    yield call(case.matrix(), 8, case.seeds, case.index, None)


# The rows that are packed of queries, keys or values: the tokens of an index, less the mean of their sequence.
PACK_TOKENS = operation(
    "PACK_TOKENS", _pack_tokens_plainly, None, triton.pack_tokens, _tokens_samples, moved=0.002, by_row=False
)


@operator(
    "pack_attention",
    samples=_pack_samples,
    flops=lambda query, key, value, *_: 2 * GROUP * (math.prod(query) + math.prod(key) + math.prod(value)),
    native=native.stored_attention,
)
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
    """Pack queries (B, h, Tq, d), keys (B, hk, Tk, d) less their mean over the sequence, and values (B, hk, Tk, dv).

    index: Tokens whose queries are packed, int64, shape (n,), ascending, of B · Tq; None for all. kv_index: The same of
    keys and values, of B · Tk.
    """
    return _PACKED(query, key, value, plain.key_mean(key), index, kv_index, seed, (bits_q, bits_k, bits_v))


def _pack(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mean: Tensor,
    index: Tensor | None,
    kv_index: Tensor | None,
    seed: int | None,
    bits: Bits,
) -> Tensor:
    """Return the bytes of :func:`pack_attention`, with the means of the keys."""
    parts = parts_of(query, key, value, index, kv_index, bits)
    stored = blank_stored(query, parts)
    place, *places = views(stored, parts)
    seeds = each_of(fresh_seeds(place, seed))
    for i, (tensor, at, means) in enumerate(((query, index, None), (key, kv_index, mean), (value, kv_index, None))):
        PACK_TOKENS(plain.heads_together(tensor), bits[i], seeds[i], at, means, out=places[2 * i : 2 * i + 2])
    return stored


_PACKED = Repeated(_pack)


@pack_attention.register_fake
def _(query, key, value, index, kv_index, seed, bits_q, bits_k, bits_v):
    parts = parts_of(query, key, value, index, kv_index, (bits_q, bits_k, bits_v))
    return query.new_empty(stored_bytes(parts), dtype=torch.uint8)


def _plain_rows(*stored: Tensor, bits: int, columns: int, dtype: torch.dtype) -> Rows:
    codes, scales, seed = stored
    parts = packing.unpack_parts(codes, scales, seed, bits, columns, dtype)
    return lambda begin, end: unrotate(parts(begin, end), seed)


def _unpacked_rows(*stored: Tensor, bits: int, columns: int, dtype: torch.dtype) -> Rows:
    matrix = UNPACK(*stored, bits, columns, dtype)
    return lambda begin, end: matrix[begin:end]


def _unpack(
    stored: Tensor, rows: int, kv_rows: int, columns: tuple[int, int, int], bits: Bits, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return queries, keys and values, one row for each token that was packed, in new memory."""
    seeds, *parts = views(stored, attention_parts(rows, kv_rows, columns, bits))
    return tuple([UNPACK(*parts[2 * i : 2 * i + 2], seeds[i : i + 1], bits[i], columns[i], dtype) for i in range(3)])


_UNPACKED = Repeated(_unpack)


def _gradients(
    make: Callable[..., Rows], steps_of: Callable[[torch.dtype], Steps]
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return the gradients with a function that makes those that unpack rows."""

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
        on_gpu = runs_kernels(grad_output)
        wide, is_state = _wide(grad_output), kept is not None and kept.dim() == 1
        dtype, is_plain = grad_output.dtype if on_gpu else wide, kept is None and bias is None
        if is_plain and mask is None and index is None and kv_index is None and is_faster_on_cpu(grad_output, spec):
            rows = [*_UNPACKED(stored, *counts, columns, bits, grad_output.dtype)]
            if (found := fused_gradients(grad_output, rows, spec)) is not None:
                return found
        if is_state or (on_gpu and is_plain):
            try:
                rows = [*_UNPACKED(stored, *counts, columns, bits, dtype)]
                found = fused_gradients(grad_output, rows, spec, mask, kept, index, kv_index)
            except RuntimeError as error:
                if is_state or isinstance(error, torch.OutOfMemoryError):
                    raise
                _warn_of_kernel(str(error).partition("\n")[0])
                found = None
            if found is not None:
                return found
        seeds, *parts = views(stored, attention_parts(*counts, columns, bits))
        query, key, value = (
            make(*parts[2 * i : 2 * i + 2], seeds[i : i + 1], bits=bits[i], columns=columns[i], dtype=dtype)
            for i in range(3)
        )
        return attention_gradients(
            grad_output, (query, key, value), spec, mask, kept, index, kv_index, bias=bias, steps=steps_of(wide)
        )

    return run


@functools.cache
def _warn_of_kernel(error: str) -> None:
    logger.warning(
        "A fused attention kernel of PyTorch has no backward pass here (%s); blocks of scores are used, which are "
        "slower. Disable it with torch.nn.attention.sdpa_kernel to be spared the attempt.",
        error,
    )


def _plain_steps(dtype: torch.dtype) -> Steps:
    return Steps()


# In C, float64 has rows that were unpacked in float32, and steps in plain PyTorch.
ATTENTION_BACKWARD = operation(
    "ATTENTION_BACKWARD",
    _gradients(_plain_rows, _plain_steps),
    _gradients(native.rows_of, native.steps_of),
    _gradients(_unpacked_rows, _plain_steps),
    _row_samples,
    native_dtypes=FLOATS,
    by_row=False,
)


def _backward_flops(
    y: Sequence[int], stored, bias, needs_bias, mask, kept, index, kv_index, keys: int, kv_heads: int, width: int, *_
) -> int:
    batch, queries, heads, value_width = y
    products = 3 * width + 2 * value_width  # scores, dQ and dK; dP and dV
    return 2 * batch * heads * queries * keys * products + 2 * GROUP * batch * queries * heads * width * 3


@operator(
    "attention_backward",
    "(Tensor grad_output, Tensor stored, Tensor? bias, bool needs_bias, Tensor? mask, Tensor? kept, Tensor? index, "
    "Tensor? kv_index, SymInt keys, SymInt kv_heads, SymInt width, float scale, bool is_causal, float p, "
    "SymInt bits_q, SymInt bits_k, SymInt bits_v) -> (Tensor, Tensor, Tensor, Tensor)",
    samples=lambda case: (call(*one, True) for one, _ in _gradient_samples(case)),
    flops=_backward_flops,
    native=native.stored_attention_backward,
    flatten=lambda y, stored, mask, kept, index, kv_index, spec, bits, bias=None, needs_bias=False: (
        y, stored, bias, needs_bias, mask, kept, index, kv_index,
        spec.keys, spec.kv_heads, spec.width, spec.scale, spec.is_causal, spec.p, *bits,
    ),
    registered=lambda function, y, stored, bias, needs_bias, mask, kept, index, kv_index, *named: function(
        y, stored, mask, kept, index, kv_index, AttentionSpec(*named[:6]), named[6:], bias, needs_bias
    ),
)  # fmt: skip
def attention_backward(
    grad_output: Tensor,
    stored: Tensor,
    mask: Tensor | None,
    kept: Tensor | None,
    index: Tensor | None,
    kv_index: Tensor | None,
    spec: AttentionSpec,
    bits: Bits,
    bias: Tensor | None = None,
    needs_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients with respect to queries, keys, values and a bias of the scores, from packed copies.

    grad_output: dO, (B, Tq, h, dv). stored, index, kv_index, bits: Of :func:`pack_attention`. mask: Bool or additive,
    (B or 1, h or 1, Tq, Tk), or None. kept: Bits of dropout, see
    :func:`rmm_linear.packing.attention_gradients.attention_gradients`, or the state from which
    :func:`attention_with_dropout` has drawn them, or None. bias: Added to the scores, as wide as the mask.

    Returns shapes (B, Tq, h, d), (B, Tk, hk, d) and (B, Tk, hk, dv), dtype of ``grad_output``, contiguous; and that of
    ``bias``, float32 at least, or (0,) without ``needs_bias``.
    """
    gradient = _empty(grad_output, bias, needs_bias)
    own = None if bias is None else Bias(bias, gradient.zero_() if needs_bias else None)
    dq, dk, dv = ATTENTION_BACKWARD(grad_output, stored, mask, kept, index, kv_index, spec=spec, bits=bits, bias=own)
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), gradient


def _empty(y: Tensor, bias: Tensor | None, needs_bias: bool) -> Tensor:
    if bias is None or not needs_bias:
        return y.new_empty(0, dtype=_wide(y if bias is None else bias))
    return bias.new_empty(bias.shape, dtype=_wide(bias))


@attention_backward.register_fake
def _(grad_output, stored, bias, needs_bias, mask, kept, index, kv_index, keys, kv_heads, width, *named):
    batch, queries, heads, value_width = grad_output.shape
    return (
        grad_output.new_empty(batch, queries, heads, width),
        grad_output.new_empty(batch, keys, kv_heads, width),
        grad_output.new_empty(batch, keys, kv_heads, value_width),
        _empty(grad_output, bias, needs_bias),
    )


def _dropped_samples(case: Case) -> Iterator[Call]:
    query, key, value, _ = _tensors(case)
    kept = torch.rand(*query.shape[:3], key.shape[2], generator=torch.Generator().manual_seed(6)) > 0.3
    for mask, is_causal in ((None, False), (None, True), (kept[:, :1], False)):
        yield call(query, key, value, mask, kept, 0.3, is_causal, 0.3)
    whole = (one.repeat_interleave(2, 1) for one in (key, value))  # as many heads as queries have
    yield call(query, *whole, None, kept, 0.3, False, 0.3)


@operator(
    "dropped_attention",
    samples=_dropped_samples,
    flops=lambda query, key, value, *_: 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3]),
)
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
    """Apply attention with a known mask of dropout, see :func:`rmm_linear.packing.attention.dropped_attention`."""
    spec = AttentionSpec(key.shape[2], key.shape[1], key.shape[3], scale, is_causal, p)
    return plain.dropped_attention(query, key, value, mask, kept, spec)


@dropped_attention.register_fake
def _(query, key, value, mask, kept, scale, is_causal, p):
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def _seeded_samples(case: Case) -> Iterator[Call]:
    """Of calls that draw nothing: what a kernel draws is known to itself alone."""
    query, key, value, _ = _tensors(case)
    whole = [one.repeat_interleave(2, 1) for one in (key, value)]
    mask = torch.rand(query.shape[0], 1, query.shape[2], key.shape[2]) > -1
    for seen, is_causal in ((None, False), (None, True), (mask, False)):
        yield call(query, *whole, seen, 0.3, is_causal, 0.0, False)
    yield call(query, key, value, None, 0.3, False, 0.0, True)


@operator(
    "attention_with_dropout",
    samples=_seeded_samples,
    flops=lambda query, key, value, *_: 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3]),
    tags=("nondeterministic_seeded", "cudagraph_unsafe"),  # it reads the state of the generator
)
def attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    is_causal: bool,
    p: float,
    enable_gqa: bool,
    kernel: int = -1,
) -> tuple[Tensor, Tensor]:
    """Apply attention with dropout by a fused kernel, see :func:`rmm_linear.ops.fused_attention.dropped_output`.

    kernel: The number of the kernel that PyTorch takes, or -1 to ask it.
    """
    spec = AttentionSpec(key.shape[2], key.shape[1], key.shape[3], scale, is_causal, p)
    return dropped_output(query, key, value, mask, spec, None if kernel < 0 else SDPBackend(kernel), enable_gqa)


@attention_with_dropout.register_fake
def _(query, key, value, mask, scale, is_causal, p, enable_gqa, kernel=-1):
    output = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return output, query.new_empty(state_bytes(query.device), dtype=torch.uint8, device="cpu")
