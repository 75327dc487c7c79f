"""sketched_linear: a linear layer that saves a sketch of its input for the backward pass.

    forward    out = X Wᵀ + b (exact)    save Z = pack(SᵀX), the seed of S, and W
    backward   dX = Y W (exact)   db = Yᵀ1 (exact)   dW = (SᵀY)ᵀ unpack(Z)

E[S Sᵀ] = 1 and E[unpack(pack(Z)) | Z] = Z make E[dW] = YᵀX: the gradient is unbiased, whatever Y is.

Source: Bershatsky et al. 2022, arXiv 2201.13195, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rmm_linear._support.autocast import autocast_dtype, autocast_off, cast
from rmm_linear.config import RMMConfig
from rmm_linear.context.sketch_cache import SketchCache
from rmm_linear.layers.function import RefusedGradient, SketchedLinearFunction, UnsavedLinearFunction
from rmm_linear.ops.save import save_input, save_traced
from rmm_linear.sketches import TokenMask
from rmm_linear.sketches.seeds import draw_seed
from rmm_linear.spec import SaveSpec


@dataclass(eq=False)  # frozen, it would take a microsecond more
class LinearCall:
    """What one call of one layer does with its input.

    Attributes:
        spec: How the input is saved.
        seed: Seed of S and of the rounding. None in compiled code, where an operator draws one in every step.
        dtype: The dtype that autocast runs the layer in, or None while it is off.
        mask: The valid tokens, or None for all.
        cache: Sketches that other layers made in this forward pass, or None to share nothing.
        index: Index of the layer, for ``cache``.
        expected: Returns ŷ, the expected norms ‖yᵢ‖, float32, shape (N,), or None without a prediction. Called only
            where a sketch is made, so once for all layers that share it. None is a call without predictions.
        on_backward: Called with Y, shape (N, O), and the mask, before the weight gradient is computed from them.
    """

    spec: SaveSpec
    seed: int | None
    dtype: torch.dtype | None = None
    mask: TokenMask | None = None
    cache: SketchCache | None = None
    index: int = 0
    expected: Callable[[], Tensor | None] | None = None
    on_backward: Callable[[Tensor, TokenMask | None], None] | None = None


def sketched_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: RMMConfig,
    seed: int | None = None,
    token_mask: Tensor | None = None,
) -> Tensor:
    """Apply ``input @ weight.T + bias`` and save a small sketch for the backward pass instead of the input.

    Exact: the output and the gradients with respect to input and bias. Random and unbiased: the gradient with respect
    to the weight. Nothing is saved if the weight is frozen or grad mode is off. With N ≤ ``min_rows``, or K ≥ N and no
    bits, the input itself is saved and everything is exact.

    Memory: ``config.spec(N, I, itemsize).bytes(...)``. Time: the weight gradient costs K/N of the exact one; the
    sketches of X and Y are additional (one pass each for countsketch).

    Args:
        input: Activations X, shape (*, I); N is the product of the leading dimensions.
        weight: Shape (O, I).
        bias: Shape (O,), or None.
        config: Kind, ratio or memory, bits, block and min_rows; its module patterns are not used here.
        seed: Seed of S, a signed 64-bit integer. None draws one from torch's global CPU generator, whether grad mode is
            on or not, so that later random numbers do not depend on it.
        token_mask: True, or a non-zero integer, for rows whose gradient with respect to the output is not zero; padding
            is false and left out of the sketch. Shape (*), as the leading dimensions of ``input``. It is not checked: a
            masked row with a gradient would be missing from dW.

    Returns:
        Shape (*, O). Equal to the output of ``torch.nn.functional.linear`` to the bit.

    Raises:
        ValueError: If ``token_mask`` has another shape than the leading dimensions of ``input``, or ``seed`` more bits.
        TypeError: If ``config``, ``seed`` or ``token_mask`` has the wrong type.

    Example:
        >>> import torch
        >>> x, w = torch.randn(512, 8), torch.randn(4, 8, requires_grad=True)
        >>> sketched_linear(x, w, config=RMMConfig(ratio=0.25), seed=0).sum().backward()
        >>> w.grad.shape
        torch.Size([4, 8])
    """
    _check_arguments(input, config, seed, token_mask)
    dtype = autocast_dtype(input.device.type, input.dtype)
    spec = spec_for(input.shape, (dtype or input.dtype).itemsize, weight, config)
    if spec is None:
        return F.linear(input, weight, bias)
    if seed is None and not torch.compiler.is_compiling():
        seed = draw_seed()
    mask = None if token_mask is None else TokenMask.of(token_mask.reshape(-1))
    return saved_linear(input, weight, bias, LinearCall(spec, seed, dtype, mask))


def _check_arguments(input: Tensor, config: object, seed: object, token_mask: Tensor | None) -> None:
    if not isinstance(config, RMMConfig):
        raise TypeError(f"config must be an RMMConfig, got {type(config).__name__}. Use RMMConfig(...).")
    if seed is not None and type(seed) is not int:
        raise TypeError(f"seed must be an integer or None, got {seed!r}.")
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be a signed 64-bit integer, got {seed}.")
    if token_mask is None:
        return
    if token_mask.is_floating_point() or token_mask.is_complex():
        raise TypeError(
            f"token_mask must be of booleans or integers, got {token_mask.dtype}. Of a mask that is added to attention "
            "scores, take token_mask=(mask == 0)."
        )
    if token_mask.shape != input.shape[:-1]:
        raise ValueError(
            "token_mask must have the shape of input without its last dimension, "
            f"got {tuple(token_mask.shape)} for an input of {tuple(input.shape)}."
        )


def spec_for(
    shape: torch.Size, itemsize: int, weight: Tensor, config: RMMConfig, bits: int | None = None
) -> SaveSpec | None:
    """Return how a layer saves its input, from shapes and dtypes alone.

    Args:
        shape: Of the input X, (*, I).
        itemsize: Bytes per element that the layer computes with.
        weight: Shape (O, I).
        config: The layer's configuration.
        bits: The width chosen for ``bits="auto"``; None is the configuration's own rule.

    Returns:
        The spec; None if the layer is exact: frozen or empty weight, few tokens, or a shape that torch will refuse.
    """
    if not weight.requires_grad or 0 in weight.shape or not shape or shape[-1] != weight.shape[-1]:
        return None
    return config.spec(shape[:-1].numel(), shape[-1], itemsize, bits)


def saved_linear(input: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
    """Apply ``input @ weight.T + bias`` and save what ``call`` describes.

    Args:
        input: Activations X, shape (*, I).
        weight: Shape (O, I).
        bias: Shape (O,), or None.
        call: What is saved.

    Returns:
        Shape (*, O).
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return F.linear(input, weight, bias)
    x = input.detach() if call.dtype is None else cast(input.detach(), call.dtype)
    # Made outside of the autograd function, so that layers can share it: compilers let autograd functions share nothing
    # but their inputs.
    saved = _saved(input, x, call)
    ranks = (None, None) if call.mask is None else (call.mask.order, call.mask.count)
    is_traced = call.seed is None
    return SketchedLinearFunction.run(
        input, weight, bias, x, call.dtype, call.spec, call.on_backward, is_traced, *ranks, *saved
    )


def _saved(input: Tensor, x: Tensor, call: LinearCall) -> tuple[Tensor, ...]:
    """What is saved of X; a recomputation by activation checkpointing replaces all of these tensors."""
    entry = None
    if call.cache is not None:
        entry = call.cache.entry(input, (call.spec, call.mask, call.dtype), call.index)
        if entry.saved is not None:
            return entry.saved
    with torch.no_grad(), autocast_off(x.device.type):
        if call.seed is None:
            return (save_traced(cast(input, call.dtype), call.spec, call.mask),)  # not a view: see save_traced
        expected = None if call.expected is None else call.expected()
        saved = save_input(x.reshape(-1, x.shape[-1]), call.spec, call.mask, call.seed, expected)
    if entry is not None:
        entry.saved = saved
    return saved


def unsaved_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply ``input @ weight.T + bias`` and save nothing of the input, as a layer in eval mode does.

    Exact: the output and the gradients with respect to input and bias. A backward pass that needs the gradient with
    respect to the weight raises.

    Args:
        input: Activations X, shape (*, I).
        weight: Shape (O, I).
        bias: Shape (O,), or None.

    Returns:
        Shape (*, O).
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return F.linear(input, weight, bias)
    return UnsavedLinearFunction.run(
        input, RefusedGradient.apply(weight), bias, autocast_dtype(input.device.type, input.dtype)
    )
