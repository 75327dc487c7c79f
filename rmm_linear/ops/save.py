"""What a layer keeps of its input, and the gradient made from it.

Kept are tensors only (a sketch Z, packed or not, and the seed of S or the rows that were drawn), because autograd's
saved-tensor hooks, and with them activation checkpointing, see nothing else. One operator makes all of them: selective
checkpointing keeps what some operators have returned, and runs the others again. A Z that was kept beside a seed that
was drawn again would give a gradient of noise, so whoever keeps the one must keep the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import List  # noqa: UP035

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from rmm_linear.ops import sketch as ops
from rmm_linear.packing.pack import GROUP, empty_packed, packed_bytes
from rmm_linear.sketches import SAMPLERS, TokenMask, kept_rows

DRAWN_BYTES = 8  # of the number of a drawn row, and its scale
_SEED_BYTES = 8


@dataclass(frozen=True)
class Recipe:
    """How one input is kept.

    Attributes:
        kind: Family of the sketch.
        rows: K.
        block: Tokens per block, or None.
        bits: Bits per stored element; None is the dtype itself.
        uniform_mix: Part of the probability that all tokens share alike, for kinds that draw rows from X; 0 for others.
    """

    kind: str
    rows: int
    block: int | None = None
    bits: int | None = None
    uniform_mix: float = 0.0

    def draws(self, tokens: int) -> bool:
        """Say whether rows are drawn from the input itself, and so have to be stored.

        Args:
            tokens: N.

        Returns:
            True for the kinds of :data:`rmm_linear.sketches.SAMPLERS`, unless all rows are kept.
        """
        return self.kind in SAMPLERS and self.rows < tokens

    def bytes(self, tokens: int, features: int, itemsize: int) -> int:
        """Return the bytes kept for an input: the sketch, and the seed or the drawn rows with their scales.

        Args:
            tokens: N.
            features: I.
            itemsize: Bytes per element of the input.

        Returns:
            K·I·itemsize + 8, or K·(⌈I·bits/8⌉ + 4·⌈I/64⌉) + 8 when packed. Drawn rows add 8·K, and need the seed only
            when they are packed.
        """
        rows = kept_rows(tokens, self.rows, self.block)
        stored = rows * features * itemsize if self.bits is None else packed_bytes(rows, features, self.bits)
        if not self.draws(tokens):
            return stored + _SEED_BYTES
        return stored + rows * DRAWN_BYTES + (0 if self.bits is None else _SEED_BYTES)


@torch.library.custom_op("rmm_linear::keep", mutates_args=())
def _keep(
    x: Tensor,
    seed: int,
    kind: str,
    rows: int,
    block: int | None = None,
    bits: int | None = None,
    uniform_mix: float = 0.0,
    expected: Tensor | None = None,
    order: Tensor | None = None,
    count: Tensor | None = None,
) -> List[Tensor]:  # noqa: UP006 - PyTorch 2.6 knows the return type of an operator by no other name
    """Make what is kept of an input; :func:`keep` says what, :class:`Recipe` and :class:`TokenMask` the arguments."""
    recipe = Recipe(kind, rows, block, bits, uniform_mix)
    seeds = _on_device(seed, x.device)
    if recipe.draws(x.shape[0]):
        index, scale = ops.draw_rows(x, seeds, kind, rows, uniform_mix, expected, order, count)
        stored = scale / ops.lift(x.dtype, x.shape[0], rows)
        if bits is None:
            return [ops.make_rows(x, index, stored), index, scale]
        return [*ops.packed_rows(x, seeds, index, stored, bits), index, scale, seeds]
    if bits is not None:
        return [*ops.packed_sketch(x, seeds, kind, rows, bits, block, order, count), seeds]
    power = ops.lift(x.dtype, x.shape[0], kept_rows(x.shape[0], rows, block))
    return [ops.make_sketch(x, seeds, kind, rows, block, order, count, 1 / power), seeds]


@_keep.register_fake
def _(x, seed, kind, rows, block=None, bits=None, uniform_mix=0.0, expected=None, order=None, count=None):
    return list(empty_kept(x, x.shape[0], x.shape[1], Recipe(kind, rows, block, bits, uniform_mix)))


@register_flop_formula(torch.ops.rmm_linear.keep)
def _(x: Sequence[int], seed, kind, rows, block=None, bits=None, *args, out_shape=None, **kwargs) -> int:
    tokens, columns = x
    kept = kept_rows(tokens, rows, block)
    if Recipe(kind, rows).draws(tokens):
        made = 2 * tokens * columns + rows * columns  # the norms that they are drawn by, and the rows
    else:
        made = ops.sketch_flops(x, kind, rows, block)
    return made if bits is None else made + 2 * GROUP * kept * columns


def empty_kept(like: Tensor, tokens: int, features: int, recipe: Recipe) -> tuple[Tensor, ...]:
    """Make room for what :func:`keep` makes.

    Args:
        like: Any tensor of the input's dtype, on its device.
        tokens: N.
        features: I.
        recipe: How the input is kept.

    Returns:
        The tensors, with nothing in them yet.
    """
    rows = kept_rows(tokens, recipe.rows, recipe.block)
    stored = (like.new_empty(rows, features),)
    if recipe.bits is not None:
        stored = empty_packed(rows, features, recipe.bits, like)
    seeds = (like.new_empty(1, dtype=torch.int64),)
    if not recipe.draws(tokens):
        return *stored, *seeds
    drawn = like.new_empty(rows, dtype=torch.int32), like.new_empty(rows, dtype=torch.float32)
    return *stored, *drawn, *(() if recipe.bits is None else seeds)


def keep(
    x: Tensor, recipe: Recipe, seed: int, mask: TokenMask | None = None, expected: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Make what is kept of an input.

    Args:
        x: Input, shape (N, I).
        recipe: How it is kept.
        seed: Seed of S and of the rounding.
        mask: The tokens that count, or None for all.
        expected: ŷ, what is expected of ‖yᵢ‖, float32, shape (N,), for kinds that draw rows from X; None where nothing
            is known.

    Returns:
        Z and the seed, or codes, ranges and the seed when packed; tensors on the device of ``x``. Where rows are drawn
        from X, they and their scales come after Z or the ranges, and without packing in the place of the seed.
    """
    if mask is None and recipe.bits is None and kept_rows(x.shape[0], recipe.rows, recipe.block) >= x.shape[0]:
        return x, _on_device(seed, x.device)  # the seed decides nothing here
    ranks = (None, None) if mask is None else (mask.order, mask.count)
    how = recipe.kind, recipe.rows, recipe.block, recipe.bits, recipe.uniform_mix
    return tuple(_keep(x, seed, *how, expected, *ranks))


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


def weight_gradient(
    y: Tensor, kept: tuple[Tensor, ...], recipe: Recipe, features: int, mask: TokenMask | None
) -> Tensor:
    """Return the estimate of dW = YᵀX.

    Args:
        y: Gradient by the layer's output, shape (N, O).
        kept: Result of :func:`keep`.
        recipe: The recipe it was made by.
        features: I.
        mask: The mask it was made with.

    Returns:
        (SᵀY)ᵀ Z, shape (O, I), dtype of ``y``.
    """
    if recipe.draws(y.shape[0]):
        return _gradient_of_drawn(y, kept, recipe, features)
    *stored, seeds = kept
    ranks = (None, None) if mask is None else (mask.order, mask.count)
    if recipe.bits is not None:
        return ops.unpacked_product(
            y, *stored, seeds, recipe.kind, recipe.rows, recipe.bits, features, recipe.block, *ranks
        )
    rows = kept_rows(y.shape[0], recipe.rows, recipe.block)
    if mask is not None or rows < y.shape[0]:
        power = ops.lift(y.dtype, y.shape[0], rows)
        y = ops.sketch(y, seeds, recipe.kind, recipe.rows, recipe.block, *ranks, power)
    return y.T @ stored[0]


def _gradient_of_drawn(y: Tensor, kept: tuple[Tensor, ...], recipe: Recipe, features: int) -> Tensor:
    power = ops.lift(y.dtype, y.shape[0], recipe.rows)
    if recipe.bits is None:
        z, index, scale = kept
        return ops.gather_rows(y, index, scale * power).T @ z
    codes, ranges, index, scale, seeds = kept
    drawn = ops.gather_rows(y, index, scale * power)
    # SᵀY has K rows already; K rows are not sketched again.
    return ops.unpacked_product(drawn, codes, ranges, seeds, recipe.kind, recipe.rows, recipe.bits, features)
