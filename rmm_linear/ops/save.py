"""What is saved of an input for the backward pass, and the weight gradient made from it.

Saved are tensors only (a sketch Z, packed or not, and the seed of S or the sampled rows), because autograd's
saved-tensor hooks, and with them activation checkpointing, see nothing else. One operator makes all of them: selective
checkpointing keeps what some operators have returned, and runs the others again. A Z that was kept beside a seed that
was drawn again would give a gradient of noise, so whoever keeps the one must keep the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from rmm_linear.ops.arguments import SCHEMA, from_arguments, to_arguments
from rmm_linear.ops.fp16 import fp16_scale
from rmm_linear.ops.rows import gather_rows, gather_rows_operator, packed_rows, sample_rows
from rmm_linear.ops.sketch import (
    packed_sketch,
    scaled_sketch,
    sketch_flops,
    sketch_operator,
    unpacked_product,
    unpacked_product_operator,
)
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
        mask: The tokens that count, or None for all.
        seed: Seed of S and of the rounding.
        expected: ŷ, what is expected of ‖yᵢ‖, float32, shape (N,), for kinds that sample rows of X; None where nothing
            is known.

    Returns:
        Z and the seed, or codes, qparams and the seed when packed; tensors on the device of ``x``. Where rows are
        sampled, they and their scales come after Z or the qparams, and without packing in the place of the seed.
    """
    seeds = _on_device(seed, x.device)
    if spec.samples_rows(x.shape[0]):
        index, scale = sample_rows(x, seeds, spec, expected, mask)
        stored = RowSample(index, scale / fp16_scale(x.dtype, x.shape[0], spec.rows))
        if spec.bits is None:
            return gather_rows(x, stored), index, scale
        return *packed_rows(x, seeds, stored, spec.bits), index, scale, seeds
    if spec.bits is not None:
        return *packed_sketch(x, seeds, spec, mask), seeds
    scale = fp16_scale(x.dtype, x.shape[0], spec.kept_rows(x.shape[0]))
    return scaled_sketch(x, seeds, spec, mask, 1 / scale), seeds


# PyTorch 2.6 takes a list, no tuple, from an operator that returns Tensor[].
@torch.library.custom_op(
    "rmm_linear::keep", mutates_args=(), schema=f"(Tensor x, int seed, Tensor? expected, {SCHEMA}) -> Tensor[]"
)
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
        made = 2 * tokens * columns + spec.rows * columns  # the norms that they are sampled by, and the rows
    else:
        made = sketch_flops(x, spec.kind, spec.rows, spec.block)
    return made if spec.bits is None else made + 2 * GROUP * spec.kept_rows(tokens) * columns


def save_input(
    x: Tensor, spec: SaveSpec, mask: TokenMask | None, seed: int, expected: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Make what eager code saves of an input, by one operator.

    Args:
        x: Input, shape (N, I).
        spec: How it is saved.
        mask: See :func:`save`.
        seed: See there.
        expected: See there.

    Returns:
        See there.
    """
    if mask is None and spec.bits is None and spec.kept_rows(x.shape[0]) >= x.shape[0]:
        return x, _on_device(seed, x.device)  # the seed decides nothing here
    return tuple(_keep(x, seed, expected, *to_arguments(spec, mask)))


def empty_saved(like: Tensor, tokens: int, features: int, spec: SaveSpec) -> tuple[Tensor, ...]:
    """Make room for what :func:`save` makes.

    Args:
        like: Any tensor of the input's dtype, on its device.
        tokens: N.
        features: I.
        spec: How the input is saved.

    Returns:
        The tensors, with nothing in them yet.
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
        # A number would be the same in every replay of the graph; the device's generator is not.
        seeds ^= torch.randint(2**63 - 1, (1,), device=device)
    return seeds


def is_capturing(device: torch.device) -> bool:
    """Say whether a CUDA graph is being captured, when nothing may be read from the device.

    Args:
        device: Any device.

    Returns:
        False on all but CUDA's.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Parts(NamedTuple):
    """What a weight gradient is made of: operators, or what runs below them."""

    sketch: Callable[..., Tensor]
    gather_rows: Callable[..., Tensor]
    unpacked_product: Callable[..., Tensor]


_FUNCTIONS = _Parts(scaled_sketch, gather_rows, unpacked_product)
_OPERATORS = _Parts(sketch_operator, gather_rows_operator, unpacked_product_operator)


def weight_gradient(
    y: Tensor,
    saved: Sequence[Tensor],
    spec: SaveSpec,
    features: int,
    mask: TokenMask | None,
    *,
    in_operator: bool = False,
) -> Tensor:
    """Return the estimate of dW = YᵀX.

    Args:
        y: Gradient with respect to the layer's output, shape (N, O).
        saved: Result of :func:`save`.
        spec: The spec it was made by.
        features: I.
        mask: The mask it was made with.
        in_operator: Whether an operator calls: operators call no others.

    Returns:
        (SᵀY)ᵀ Z, shape (O, I), dtype of ``y``.
    """
    use = _FUNCTIONS if in_operator else _OPERATORS
    if spec.samples_rows(y.shape[0]):
        return _sampled_gradient(y, saved, spec, features, use)
    *stored, seeds = saved
    if spec.bits is not None:
        return use.unpacked_product(y, *stored, seeds, spec, features, mask)
    rows = spec.kept_rows(y.shape[0])
    if mask is not None or rows < y.shape[0]:
        y = use.sketch(y, seeds, spec, mask, fp16_scale(y.dtype, y.shape[0], rows))
    return y.T @ stored[0]


def _sampled_gradient(y: Tensor, saved: Sequence[Tensor], spec: SaveSpec, features: int, use: _Parts) -> Tensor:
    power = fp16_scale(y.dtype, y.shape[0], spec.rows)
    if spec.bits is None:
        z, index, scale = saved
        return use.gather_rows(y, RowSample(index, scale * power)).T @ z
    codes, qparams, index, scale, seeds = saved
    sampled = use.gather_rows(y, RowSample(index, scale * power))
    # SᵀY has K rows already; K rows are not sketched again.
    return use.unpacked_product(sampled, codes, qparams, seeds, spec, features, None)
