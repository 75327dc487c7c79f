"""Forward passes in compiled code: fresh sketches in every step, masks, one Z for siblings.

A compiler runs the Python of a forward pass once and its operators in every step, and it may run operators again in the
backward pass instead of keeping what they made. So here one operator draws the seed and makes the sketch, and returns
both in one tensor of bytes: whatever a compiler keeps, recomputes or merges, Z and its S are of one draw. (A seed that
is drawn by an operator of its own is not safe: compilers have recomputed it in the backward pass beside a Z that they
had kept, and the gradient was noise.) Layers that read one input in one way call the operator with the same arguments,
which compilers merge: one Z is kept for them.

Seeds come from PyTorch's global CPU generator, as in eager code, but call by call. A token mask is a pair of tensors,
whether or not anything is padded. ``torch.compile(model)`` runs the hooks of the model itself outside of the compiled
forward pass and those of its submodules inside; both find the masks below. A block that is compiled by itself finds
none and keeps padding in the sketch. Norm estimators neither predict nor learn in compiled code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear.context.call_inputs import given_mask
from rmm_linear.norm_estimators.samples import SAMPLE_INDEX
from rmm_linear.ops.save import Recipe, empty_kept, keep, weight_gradient
from rmm_linear.sketches import TokenMask
from rmm_linear.sketches.seeds import draw_seed

_ALIGNED = 16  # bytes: every part can be viewed as its own dtype


@torch.library.custom_op("rmm_linear::fresh_sketch", mutates_args=())
def fresh_sketch(
    x: Tensor,
    kind: str,
    rows: int,
    block: int | None = None,
    bits: int | None = None,
    uniform_mix: float = 0.0,
    order: Tensor | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """Draw a seed from the global CPU generator and return what ``keep`` makes with it, as bytes.

    Args:
        x: Input, shape (*, I), as the layer got it: compilers do not merge operators on two views of what is also an
            output of the model, as the last hidden state of an encoder is.
        kind: As in :class:`rmm_linear.ops.save.Recipe`, as the following ones.
        rows: K.
        block: Tokens per block, or None.
        bits: Bits per stored element, or None.
        uniform_mix: For kinds that draw rows from X.
        order: See :class:`rmm_linear.sketches.TokenMask`.
        count: See there.

    Returns:
        uint8, one dimension: the tensors one after the other, each beginning at a multiple of 16 bytes.
    """
    recipe = Recipe(kind, rows, block, bits, uniform_mix)
    parts = keep(x.reshape(-1, x.shape[-1]), recipe, draw_seed(), TokenMask.made_of(order, count))
    stored = x.new_zeros(_total(parts), dtype=torch.uint8)
    for part, place in zip(parts, _places(parts), strict=True):
        stored[place : place + part.nbytes].view(part.dtype).view(part.shape).copy_(part)
    return stored


@fresh_sketch.register_fake
def _(x, kind, rows, block=None, bits=None, uniform_mix=0.0, order=None, count=None):
    tokens = math.prod(x.shape[:-1])  # Size.numel would fix the lengths
    parts = empty_kept(x, tokens, x.shape[-1], Recipe(kind, rows, block, bits, uniform_mix))
    return x.new_empty(_total(parts), dtype=torch.uint8)


@torch.library.custom_op("rmm_linear::stored_product", mutates_args=())
def stored_product(
    y: Tensor,
    stored: Tensor,
    columns: int,
    kind: str,
    rows: int,
    block: int | None = None,
    bits: int | None = None,
    uniform_mix: float = 0.0,
    order: Tensor | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """Return the estimate of dW = YᵀX from the bytes of :func:`fresh_sketch`.

    Args:
        y: Gradient by the layer's output, shape (N, O), dtype of the input.
        stored: The bytes.
        columns: I.
        kind: As the sketch was made, as the following ones.
        rows: K.
        block: Tokens per block, or None.
        bits: Bits per stored element, or None.
        uniform_mix: For kinds that draw rows from X.
        order: See :class:`rmm_linear.sketches.TokenMask`.
        count: See there.

    Returns:
        Shape (O, I), dtype of ``y``.
    """
    recipe = Recipe(kind, rows, block, bits, uniform_mix)
    shapes = empty_kept(y.new_empty(0, device="meta"), y.shape[0], columns, recipe)
    parts = (
        stored[place : place + shape.nbytes].view(shape.dtype).view(shape.shape)
        for shape, place in zip(shapes, _places(shapes), strict=True)
    )
    return weight_gradient(y, tuple(parts), recipe, columns, TokenMask.made_of(order, count))


@stored_product.register_fake
def _(y, stored, columns, *args, **kwargs):
    return y.new_empty(y.shape[1], columns)


def keep_afresh(x: Tensor, recipe: Recipe, mask: TokenMask | None) -> tuple[Tensor, ...]:
    """Make what compiled code keeps of an input, with a seed of its own.

    Args:
        x: Input, shape (*, I).
        recipe: How it is kept.
        mask: The tokens that count, or None for all.

    Returns:
        One tensor of bytes.
    """
    return (fresh_sketch(x, *_arguments(recipe, mask)),)


def gradient_afresh(y: Tensor, stored: Tensor, recipe: Recipe, features: int, mask: TokenMask | None) -> Tensor:
    """Return the estimate of dW = YᵀX in compiled code.

    Args:
        y: Gradient by the layer's output, shape (N, O).
        stored: The tensor of :func:`keep_afresh`.
        recipe: The recipe it was made by.
        features: I.
        mask: The mask it was made with.

    Returns:
        (SᵀY)ᵀ Z, shape (O, I), dtype of ``y``.
    """
    return stored_product(y, stored, features, *_arguments(recipe, mask))


def _arguments(recipe: Recipe, mask: TokenMask | None) -> tuple[Any, ...]:
    ranks = (None, None) if mask is None else (mask.order, mask.count)
    return recipe.kind, recipe.rows, recipe.block, recipe.bits, recipe.uniform_mix, *ranks


def _places(parts: tuple[Tensor, ...]) -> list[int]:
    """Where each part begins."""
    places = [0]
    for part in parts[:-1]:
        places.append(places[-1] + _padded(part))
    return places


def _total(parts: tuple[Tensor, ...]) -> int:
    return sum(_padded(part) for part in parts)


def _padded(part: Tensor) -> int:
    size = math.prod(part.shape) * part.itemsize
    return (size + _ALIGNED - 1) // _ALIGNED * _ALIGNED


@dataclass
class TracedPass:
    """The attention masks that hold in the modules of a compiled forward pass; empty before and after it.

    Attributes:
        masks: A mask, None for none, and the module that said so; the innermost last. Checkpoints inside of a graph may
            change nothing outside of themselves, so modules that leave the mask as it is leave no entry.
    """

    masks: list[tuple[Tensor | None, nn.Module]] = field(default_factory=list)

    def enter(self, module: nn.Module, names: tuple[str, ...], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Begin a module.

        Args:
            module: The module.
            names: Parameters of its forward.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            The keyword arguments that are for its forward.
        """
        self.exit(module)  # of a call that has failed
        given, is_known = given_mask(names, args, kwargs)
        outer = self.masks[-1][0] if self.masks else None
        if isinstance(given, Tensor) and given.dim() == 2 and given is not outer:
            self.masks.append((given, module))
        elif is_known and given is None and outer is not None:
            self.masks.append((None, module))
        if SAMPLE_INDEX in names or SAMPLE_INDEX not in kwargs:
            return kwargs
        return {name: value for name, value in kwargs.items() if name != SAMPLE_INDEX}

    def exit(self, module: nn.Module) -> None:
        """End a module.

        Args:
            module: The module.
        """
        if self.masks and self.masks[-1][1] is module:
            self.masks.pop()

    def token_mask(self, tokens: int) -> TokenMask | None:
        """Return the mask for a layer that sees ``tokens`` rows.

        Args:
            tokens: N.

        Returns:
            The mask, also if nothing is padded; None if there is none, or it has another size.
        """
        mask = self.masks[-1][0] if self.masks else None
        return None if mask is None or mask.numel() != tokens else TokenMask.of(mask.detach().reshape(-1))
