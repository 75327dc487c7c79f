"""What is saved of an input for the backward pass.

Only tensors are saved (a sketch Z, packed or not, and the seed of S or the sampled rows), because autograd's
saved-tensor hooks, and with them activation checkpointing, handle nothing else. One operator makes all of them, because
selective checkpointing stores the results of some operators and recomputes the others: a stored Z with a recomputed,
different seed would make the gradient pure noise. The results of one operator are stored or recomputed together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from rmm_linear.ops import table
from rmm_linear.ops.arguments import SCHEMA, from_arguments, to_arguments
from rmm_linear.ops.fp16 import fp16_scale
from rmm_linear.ops.operator import operator
from rmm_linear.ops.weight_gradient import scaled_sketch, sketch_flops
from rmm_linear.packing import GROUP, empty_packed
from rmm_linear.sketches import RowSample, TokenMask
from rmm_linear.spec import SaveSpec


def save(
    x: Tensor, spec: SaveSpec, mask: TokenMask | None, seed: int, expected: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Make what is saved of an input.

    Args:
        x: Input, shape (N, I).
        spec: How it is saved.
        mask: The valid tokens, or None for all.
        seed: Seed of S and of the rounding.
        expected: ŷ, the expected norms ‖yᵢ‖, float32, shape (N,), for kinds that sample rows of X; None without a
            prediction.

    Returns:
        Tensors on the device of ``x``: (Z, seed), or (codes, qparams, seed) when packed. Where rows are sampled,
        (Z, index, scale), or (codes, qparams, index, scale, seed) when packed.
    """
    seeds = _on_device(seed, x.device)
    if spec.samples_rows(x.shape[0]):
        index, scale = table.SAMPLE_ROWS(x, seeds, spec, expected, mask)
        stored = RowSample(index, scale / fp16_scale(x.dtype, x.shape[0], spec.rows))
        if spec.bits is None:
            return table.GATHER_ROWS(x, stored), index, scale
        return *table.PACKED_ROWS(x, seeds, stored, spec.bits), index, scale, seeds
    if spec.bits is not None:
        return *table.PACKED_SKETCH(x, seeds, spec, mask), seeds
    scale = fp16_scale(x.dtype, x.shape[0], spec.kept_rows(x.shape[0]))
    return scaled_sketch(x, seeds, spec, mask, 1 / scale), seeds


# PyTorch 2.6 accepts a list, but not a tuple, from an operator that returns Tensor[].
@operator("keep", f"(Tensor x, SymInt seed, Tensor? expected, {SCHEMA}) -> Tensor[]")
def _keep(x, seed, expected, *arguments, **named):
    return list(save(x, *from_arguments(*arguments, **named), seed, expected))


@_keep.register_fake
def _(x, seed, expected, *arguments, **named):
    spec, _mask = from_arguments(*arguments, **named)
    return list(empty_saved(x, x.shape[0], x.shape[1], spec))


@register_flop_formula(torch.ops.rmm_linear.keep)
def _(x: Sequence[int], seed, expected, *arguments, out_shape=None, **named) -> int:
    (tokens, columns), (spec, _mask) = x, from_arguments(*arguments, **named)
    if spec.samples_rows(tokens):
        made = 2 * tokens * columns + spec.rows * columns  # the norms of all rows, and the sampled rows
    else:
        made = sketch_flops(x, spec.kind, spec.rows, spec.block)
    return made if spec.bits is None else made + 2 * GROUP * spec.kept_rows(tokens) * columns


def save_input(
    x: Tensor, spec: SaveSpec, mask: TokenMask | None, seed: int, expected: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Make what eager code saves of an input, with one operator.

    Args:
        x: Input, shape (N, I).
        spec: How it is saved.
        mask: See :func:`save`.
        seed: See :func:`save`.
        expected: See :func:`save`.

    Returns:
        The tensors of :func:`save`; X alone where every row is saved as it is.
    """
    if mask is None and spec.bits is None and spec.kept_rows(x.shape[0]) >= x.shape[0]:
        return (x.clone(memory_format=torch.contiguous_format) if is_view_of_more(x) else x,)  # without the seed
    return tuple(_keep(x, seed, expected, *to_arguments(spec, mask)))


def empty_saved(like: Tensor, tokens: int, features: int, spec: SaveSpec) -> tuple[Tensor, ...]:
    """Return uninitialized tensors with the shapes and dtypes of :func:`save`'s result.

    Args:
        like: Any tensor of the input's dtype, on its device.
        tokens: N.
        features: I.
        spec: How the input is saved.

    Returns:
        The tensors.
    """
    rows = spec.kept_rows(tokens)
    stored = (like.new_empty(rows, features),)
    if spec.bits is not None:
        stored = empty_packed(rows, features, spec.bits, like)
    seeds = (like.new_empty(1, dtype=torch.int64),)
    if not spec.samples_rows(tokens):
        return *stored, *seeds
    sampled = like.new_empty(rows, dtype=torch.int32), like.new_empty(rows, dtype=torch.float32)
    return *stored, *sampled, *(() if spec.bits is None else seeds)


def _on_device(seed: int, device: torch.device) -> Tensor:
    seeds = torch.full((1,), seed, dtype=torch.int64, device=device)
    if is_capturing(device):
        # A Python number would be the same in every replay of the graph; the device's random numbers are not.
        seeds ^= torch.randint(2**63 - 1, (1,), device=device)
    return seeds


def is_view_of_more(x: Tensor) -> bool:
    """Say whether saving a tensor would keep much more memory alive than it needs, as ``hidden[:, 0]`` does.

    Args:
        x: The tensor.

    Returns:
        True if its storage has more than twice its bytes. Always False in compiled code, which saves no views.
    """
    return not torch.compiler.is_compiling() and 0 < 2 * x.nbytes < x.untyped_storage().nbytes()


def is_capturing(device: torch.device) -> bool:
    """Say whether a CUDA graph is being captured, while nothing may be read from the device.

    Args:
        device: Any device.

    Returns:
        Always False for devices other than CUDA.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
