"""What compiled code saves of an input: a sketch with a new seed in every step, shared by the layers that read it.

A compiler runs the Python of a forward pass once and its operators in every step, and it may recompute operators in the
backward pass instead of saving their results. So one operator draws the seed and makes the sketch, and returns both in
one tensor of bytes: whatever a compiler saves, recomputes or merges, Z belongs to its seed. (A seed that is drawn by a
separate operator is not safe: compilers have recomputed it in the backward pass while Z was saved, and the gradient was
noise.) Layers that read one input with one spec and mask call the operator with the same arguments; compilers merge
these calls, so that one Z is saved for all of them.

Seeds come from PyTorch's global CPU generator, as in eager code, but call by call.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rmm_linear.ops.arguments import SCHEMA, from_arguments, to_arguments
from rmm_linear.ops.operator import operator
from rmm_linear.ops.save import empty_saved, save
from rmm_linear.ops.stored import Part, empty_stored, stored_bytes, views
from rmm_linear.ops.weight_gradient import weight_gradient
from rmm_linear.sketches import TokenMask
from rmm_linear.sketches.seeds import draw_seed
from rmm_linear.spec import SaveSpec


@operator("fresh_sketch", f"(Tensor x, {SCHEMA}) -> Tensor")
def _sketch_with_new_seed(x, *arguments, **named):
    spec, mask = from_arguments(*arguments, **named)
    saved = save(x.reshape(-1, x.shape[-1]), spec, mask, draw_seed())
    stored = empty_stored(x, _parts(saved)).zero_()
    for view, tensor in zip(views(stored, _parts(saved)), saved, strict=True):
        view.copy_(tensor)
    return stored


@_sketch_with_new_seed.register_fake
def _(x, *arguments, **named):
    spec, _mask = from_arguments(*arguments, **named)
    tokens = math.prod(x.shape[:-1])  # Size.numel would fix the lengths
    return x.new_empty(stored_bytes(_parts(empty_saved(x, tokens, x.shape[-1], spec))), dtype=torch.uint8)


@operator("stored_product", f"(Tensor y, Tensor stored, SymInt columns, {SCHEMA}) -> Tensor")
def _weight_gradient(y, stored, columns, *arguments, **named):
    spec, mask = from_arguments(*arguments, **named)
    saved = empty_saved(y.new_empty(0, device="meta"), y.shape[0], columns, spec)
    return weight_gradient(y, views(stored, _parts(saved)), spec, columns, mask, in_operator=True)


@_weight_gradient.register_fake
def _(y, stored, columns, *arguments, **named):
    return y.new_empty(y.shape[1], columns)


def save_traced(x: Tensor, spec: SaveSpec, mask: TokenMask | None) -> Tensor:
    """Make what compiled code saves of an input, with a new seed.

    Args:
        x: Input of the layer itself, shape (*, I), not a view: compilers do not merge operators on two views of a
            tensor that is also an output of the model, as the last hidden state of an encoder is.
        spec: How it is saved.
        mask: The valid tokens, or None for all.

    Returns:
        uint8, one dimension: the tensors of :func:`rmm_linear.ops.save.save` one after the other, each aligned to 16
        bytes.
    """
    return _sketch_with_new_seed(x, *to_arguments(spec, mask))


def weight_gradient_traced(y: Tensor, stored: Tensor, spec: SaveSpec, features: int, mask: TokenMask | None) -> Tensor:
    """Return the estimate of dW = YᵀX in compiled code.

    Args:
        y: Gradient with respect to the layer's output, shape (N, O), dtype of the input.
        stored: The bytes of :func:`save_traced`.
        spec: The spec they were made with.
        features: I.
        mask: The mask they were made with.

    Returns:
        (SᵀY)ᵀ Z, shape (O, I), dtype of ``y``.
    """
    return _weight_gradient(y, stored, features, *to_arguments(spec, mask))


def _parts(tensors: tuple[Tensor, ...]) -> list[Part]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
