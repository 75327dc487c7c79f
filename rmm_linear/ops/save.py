"""Compress an input for the backward pass.

Only tensors are saved (a sketch Z, packed or not, and the seed of S or the sampled rows), because autograd's
saved-tensor hooks, and with them activation checkpointing, handle nothing else. One operator makes all of them, because
selective checkpointing stores the results of some operators and recomputes the others: a stored Z with a recomputed,
different seed would make the gradient pure noise. The results of one operator are stored or recomputed together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rmm_linear.ops.dispatch import Call, Case, call, operator
from rmm_linear.ops.native import sketches as native
from rmm_linear.ops.plain import fp16_scale
from rmm_linear.ops.sketches import (
    DIRECTED,
    GATHER_ROWS,
    PACKED_ROWS,
    PACKED_SKETCH,
    SAMPLE_ROWS,
    SCHEMA,
    from_arguments,
    scaled_sketch,
    sketch_flops,
    specs,
    to_arguments,
    weight_gradient,
)
from rmm_linear.packing import GROUP, empty_encoded
from rmm_linear.packing.stored import Part, empty_stored, stored_bytes, views
from rmm_linear.sketches import SAMPLERS, UNIFORM_MIX, RowSample, TokenMask
from rmm_linear.sketches.seeds import draw_seed, fresh_seed
from rmm_linear.spec import COORDINATE_BITS, SaveSpec


def _samples(case: Case) -> Iterator[Call]:
    for spec in specs(case, None, 8, 4, 1.6):
        yield call(case.matrix(), spec, case.mask, 77)
    for place, kind in enumerate(SAMPLERS if case.rows > 1 else ()):
        for bits in (None, 4):
            spec = SaveSpec(kind, case.rows // 2, None, bits, UNIFORM_MIX)
            yield call(case.matrix(), spec, case.mask, 77, torch.linspace(1, 3, case.rows) if place else None)


def _flops(x: Sequence[int], seed, expected, *how: Any) -> int:
    (tokens, columns), (spec, _mask) = x, from_arguments(*how[:7])
    if spec.samples_rows(tokens):
        made = 2 * tokens * columns + spec.rows * columns  # the norms of all rows, and the sampled rows
    else:
        made = sketch_flops(x, spec.kind, spec.rows, spec.block)
    return made if spec.bits is None else made + 2 * GROUP * spec.kept_rows(tokens) * columns


# PyTorch 2.6 accepts a list, but not a tuple, from an operator that returns Tensor[].
@operator(
    "keep",
    f"(Tensor x, SymInt seed, Tensor? expected, {SCHEMA}, Tensor? basis=None) -> Tensor[]",
    samples=_samples,
    flops=_flops,
    native=native.save,
    flatten=lambda x, spec, mask, seed, expected=None, basis=None: (
        x, seed, expected, *to_arguments(spec, mask), basis
    ),
    registered=lambda function, x, seed, expected, *how, basis=None, **named: list(
        function(x, *from_arguments(*how[:7], **named), seed, expected, *(how[7:] or (basis,)))
    ),
    is_repeated=True,
)  # fmt: skip
def save(
    x: Tensor,
    spec: SaveSpec,
    mask: TokenMask | None,
    seed: int,
    expected: Tensor | None = None,
    basis: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compress an input X, shape (N, I): return the tensors that are saved.

    They are (Z, seed), or (codes, scales, seed) when packed. Where rows are sampled, (Z, index, scale), or (codes,
    scales, index, scale, seed) when packed. ``expected`` is ŷ, the expected norms ‖yᵢ‖, float32, shape (N,), for kinds
    that sample rows of X; None without a prediction. With ``basis``, the codes are of what the rows have besides these
    fixed directions, and behind the seed are codes and scales of their coordinates (:func:`~plain.directed`).
    """
    place = torch.empty(1, dtype=torch.int64, device=x.device)
    seeds = fresh_seed(place, seed)
    if basis is not None and spec.bits is not None:
        codes, scales, *coordinates = DIRECTED(x, spec.bits, seeds, basis, None if mask is None else mask.index)
        return codes, scales, place, *coordinates
    if spec.samples_rows(x.shape[0]):
        index, scale = SAMPLE_ROWS(x, seeds, spec, expected, mask)
        stored = RowSample(index, scale / fp16_scale(x.dtype, x.shape[0], spec.rows))
        if spec.bits is None:
            return GATHER_ROWS(x, stored), index, scale
        return *PACKED_ROWS(x, place, stored, spec.bits), index, scale, place
    if spec.bits is not None:
        return *PACKED_SKETCH(x, seeds, spec, mask), place
    scale = fp16_scale(x.dtype, x.shape[0], spec.kept_rows(x.shape[0]))
    return scaled_sketch.function(x, seeds, spec, mask, 1 / scale), place


@save.register_fake
def _(x, seed, expected, *arguments, basis=None, **named):
    (spec, _mask), basis = from_arguments(*arguments[:7], **named), (arguments[7] if len(arguments) > 7 else basis)
    saved = empty_saved(x, x.shape[0], x.shape[1], spec)
    return [*saved, *(() if basis is None else empty_encoded(spec.rows, basis.shape[1], COORDINATE_BITS, x))]


def save_input(
    x: Tensor,
    spec: SaveSpec,
    mask: TokenMask | None,
    seed: int,
    expected: Tensor | None = None,
    basis: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Make the tensors of :func:`save` in eager code, with one operator; X alone where every row is saved as it is."""
    if mask is None and spec.bits is None and spec.kept_rows(x.shape[0]) >= x.shape[0]:
        return (x.clone(memory_format=torch.contiguous_format) if is_view_of_more(x) else x,)  # without the seed
    if basis is not None:
        return *save(x, spec, mask, seed, expected, basis), basis
    return tuple(save(x, spec, mask, seed, expected))


def empty_saved(like: Tensor, tokens: int, features: int, spec: SaveSpec) -> tuple[Tensor, ...]:
    """Return uninitialized tensors with the shapes and dtypes of :func:`save`'s result."""
    rows = spec.kept_rows(tokens)
    stored = (like.new_empty(rows, features),)
    if spec.bits is not None:
        stored = empty_encoded(rows, features, spec.bits, like)
    seeds = (like.new_empty(1, dtype=torch.int64),)
    if not spec.samples_rows(tokens):
        return *stored, *seeds
    sampled = like.new_empty(rows, dtype=torch.int32), like.new_empty(rows, dtype=torch.float32)
    return *stored, *sampled, *(() if spec.bits is None else seeds)


def is_view_of_more(x: Tensor) -> bool:
    """Say whether saving a tensor would keep more than twice its bytes alive, as ``hidden[:, 0]`` does.

    Not so in compiled code, which saves no views.
    """
    return not torch.compiler.is_compiling() and 0 < 2 * x.nbytes < x.untyped_storage().nbytes()


@operator(
    "fresh_sketch",
    f"(Tensor x, {SCHEMA}) -> Tensor",
    samples=lambda case: (call(x, spec, mask) for (x, spec, mask, *_), _named in _samples(case)),
    flops=lambda x, *how: _flops((math.prod(x[:-1]), x[-1]), None, None, *how),
    flatten=lambda x, spec, mask: (x, *to_arguments(spec, mask)),
    registered=lambda function, x, *how, **named: function(x, *from_arguments(*how, **named)),
)
def save_traced(x: Tensor, spec: SaveSpec, mask: TokenMask | None) -> Tensor:
    """Make what compiled code saves of an input: a sketch with a new seed in every step, shared by the layers.

    A compiler runs the Python of a forward pass once and its operators in every step, and it may recompute operators in
    the backward pass instead of saving their results. So one operator draws the seed and makes the sketch, and returns
    both in one tensor of bytes: whatever a compiler saves, recomputes or merges, Z belongs to its seed. (A seed that is
    drawn by a separate operator is not safe: compilers have recomputed it in the backward pass while Z was saved, and
    the gradient was noise.) Layers that read one input with one spec and mask call the operator with the same
    arguments; compilers merge these calls, so that one Z is saved for all of them.

    Seeds come from PyTorch's global CPU generator, as in eager code, but call by call.

    x: Input of the layer itself, shape (*, I), not a view: compilers do not merge operators on two views of a tensor
    that is also an output of the model, as the last hidden state of an encoder is. Returns the tensors of :func:`save`
    in one of bytes, each aligned to 16.
    """
    saved = save.function(x.reshape(-1, x.shape[-1]), spec, mask, draw_seed())
    stored = empty_stored(x, _parts(saved)).zero_()
    for view, tensor in zip(views(stored, _parts(saved)), saved, strict=True):
        view.copy_(tensor)
    return stored


@save_traced.register_fake
def _(x, *arguments, **named):
    spec, _mask = from_arguments(*arguments, **named)
    tokens = math.prod(x.shape[:-1])  # Size.numel would fix the lengths
    return x.new_empty(stored_bytes(_parts(empty_saved(x, tokens, x.shape[-1], spec))), dtype=torch.uint8)


def _gradient_flops(y: Sequence[int], stored, columns: int, *how: Any) -> int:
    (tokens, outputs), (spec, _mask) = y, from_arguments(*how)
    rows, is_sampled = spec.kept_rows(tokens), spec.samples_rows(tokens)
    made = rows * outputs if is_sampled else sketch_flops(y, spec.kind, spec.rows, spec.block)
    unpacking = 0 if spec.bits is None else 2 * rows * columns + 2 * GROUP * outputs * columns
    return made + 2 * rows * outputs * columns + unpacking


def _flat_gradient(function, y, stored, columns, *how, **named):
    spec, mask = from_arguments(*how, **named)
    return function(y, stored, spec, columns, mask)


@operator(
    "stored_product",
    f"(Tensor y, Tensor stored, SymInt columns, {SCHEMA}) -> Tensor",
    samples=lambda case: (
        call(case.matrix(1, 9), save_traced.function(x, spec, mask), spec, case.columns, mask)
        for (x, spec, mask, *_), _named in _samples(case)
    ),
    flops=_gradient_flops,
    flatten=lambda y, stored, spec, features, mask: (y, stored, features, *to_arguments(spec, mask)),
    registered=_flat_gradient,
)
def weight_gradient_traced(y: Tensor, stored: Tensor, spec: SaveSpec, features: int, mask: TokenMask | None) -> Tensor:
    """Return the estimate of dW = YᵀX, (SᵀY)ᵀ Z of shape (O, I), in compiled code."""
    saved = empty_saved(y.new_empty(0, device="meta"), y.shape[0], features, spec)
    return weight_gradient(y, views(stored, _parts(saved)), spec, features, mask, in_operator=True)


@weight_gradient_traced.register_fake
def _(y, stored, columns, *arguments, **named):
    return y.new_empty(y.shape[1], columns)


def _parts(tensors: Sequence[Tensor]) -> list[Part]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
