"""sketched_linear: a linear layer that keeps a sketch of its input for the backward pass.

    forward    out = X Wᵀ + b (exact)    keep Z = pack(SᵀX), the seed of S, and W
    backward   dX = Y W (exact)   db = Yᵀ1 (exact)   dW = (SᵀY)ᵀ unpack(Z)

E[S Sᵀ] = 1 and E[unpack(pack(Z)) | Z] = Z make E[dW] = YᵀX: the gradient is unbiased, whatever Y is.

Source: Bershatsky et al. 2022, arXiv 2201.13195, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rmm_linear.config import RMMConfig
from rmm_linear.context.sketch_cache import SharedSketches
from rmm_linear.ops.save import Recipe, keep, weight_gradient
from rmm_linear.ops.traced import gradient_afresh, keep_afresh
from rmm_linear.sketches import TokenMask
from rmm_linear.sketches.seeds import draw_seed


@dataclass(frozen=True)
class Plan:
    """What one call of one layer does with its input.

    Attributes:
        recipe: How the input is kept.
        seed: Seed of S and of the rounding. None has compiled code draw one in every step.
        mask: The tokens that count, or None for all.
        shared: Sketches of this forward pass that other layers made, or None to share nothing.
        index: Number of the layer, for ``shared``.
        expected: Returns ŷ, what is expected of ‖yᵢ‖, float32, shape (N,), or None where nothing is known. Called only
            where a sketch is made, so that layers that share one ask once. None knows nothing.
        on_backward: Called with Y, shape (N, O), and the mask before anything is made of them.
    """

    recipe: Recipe
    seed: int | None
    mask: TokenMask | None = None
    shared: SharedSketches | None = None
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
    """Apply ``input @ weight.T + bias`` and keep a small sketch for the backward pass instead of the input.

    Exact: the output, the gradient by the input and the gradient by the bias. Random and unbiased: the gradient by the
    weight. Nothing is kept when the weight is frozen or grad mode is off. With N ≤ ``min_rows``, or K ≥ N and no bits,
    the input itself is kept and everything is exact.

    Memory: ``config.recipe(N, I, itemsize).bytes(...)``. Time: the weight gradient costs K/N of the exact one; the
    sketches of X and Y come on top (one pass each for countsketch).

    Args:
        input: Activations X, shape (*, I); N is the product of the leading dimensions.
        weight: Shape (O, I).
        bias: Shape (O,), or None.
        config: Kind, ratio or memory, bits, block and min_rows; its module patterns are not used here.
        seed: Seed of S, a signed 64-bit integer. None draws one from torch's global CPU generator, whether grad mode is
            on or not, so that later random numbers do not depend on it.
        token_mask: True, or an integer but 0, for rows whose gradient by the output is not zero, shape (*) as the
            leading dimensions of ``input``; padding is false and leaves the sketch. It is the caller's word: a masked
            row with a gradient would be missing from dW.

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
    recipe = recipe_for(input, weight, config)
    if recipe is None:
        return F.linear(input, weight, bias)
    if seed is None and not torch.compiler.is_compiling():
        seed = draw_seed()
    mask = None if token_mask is None else TokenMask.of(token_mask.reshape(-1))
    return planned_linear(input, weight, bias, Plan(recipe, seed, mask))


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


def recipe_for(input: Tensor, weight: Tensor, config: RMMConfig, bits: int | None = None) -> Recipe | None:
    """Return how a layer keeps its input, by the shapes and dtypes alone.

    Args:
        input: Activations X, shape (*, I).
        weight: Shape (O, I).
        config: The layer's configuration.
        bits: What ``bits="auto"`` stands for; None is the configuration's own rule.

    Returns:
        The recipe; None when the layer is exact: frozen or empty weight, few tokens, or a shape that torch will refuse.
    """
    if not weight.requires_grad or 0 in weight.shape or input.dim() == 0 or input.shape[-1] != weight.shape[-1]:
        return None
    itemsize = (autocast_dtype(input) or input.dtype).itemsize
    return config.recipe(input.shape[:-1].numel(), input.shape[-1], itemsize, bits)


def autocast_dtype(input: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast runs a linear layer in, or None when it is off.

    Args:
        input: Activations; their device and dtype decide.

    Returns:
        The dtype, or None.
    """
    device_type = input.device.type
    if input.dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def planned_linear(input: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan | None) -> Tensor:
    """Apply ``input @ weight.T + bias`` and keep what a plan says.

    Args:
        input: Activations X, shape (*, I).
        weight: Shape (O, I).
        bias: Shape (O,), or None.
        plan: What is kept. None keeps nothing, as a layer in eval mode does: the gradients by input and bias are exact,
            and asking for the gradient by the weight raises in the backward pass.

    Returns:
        Shape (*, O).
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return F.linear(input, weight, bias)
    dtype = autocast_dtype(input)
    x = _cast(input.detach(), dtype)
    if plan is None:
        return _SketchedLinear.apply(input, _WithoutGradient.apply(weight), bias, x, dtype, None, None, False)
    # Made outside of the node: siblings share it, and compilers let nodes share nothing but their inputs.
    saved = _saved(input, x, plan, dtype)
    afresh = plan.seed is None
    return _SketchedLinear.apply(input, weight, bias, x, dtype, plan.recipe, plan.on_backward, afresh, *saved)


def _saved(input: Tensor, x: Tensor, plan: Plan, dtype: torch.dtype | None) -> tuple[Tensor | None, ...]:
    """The mask and what is kept of X; a recomputation under checkpointing replaces all of it, or none."""
    mask = plan.mask

    def make() -> tuple[Tensor, ...]:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            if plan.seed is None:
                return keep_afresh(_cast(input, dtype), plan.recipe, mask)  # no view of it: see fresh_sketch
            expected = None if plan.expected is None else plan.expected()
            return keep(x.reshape(-1, x.shape[-1]), plan.recipe, plan.seed, mask, expected)

    key = (plan.recipe, mask, dtype)
    kept = make() if plan.shared is None else plan.shared.find_or_make(input, key, plan.index, make)
    return (*((None, None) if mask is None else (mask.order, mask.count)), *kept)


class _SketchedLinear(torch.autograd.Function):
    """The linear layer whose backward pass needs what a plan keeps, not X."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x: Tensor,
        dtype: torch.dtype | None,
        recipe: Recipe | None,
        on_backward: Callable[[Tensor, TokenMask | None], None] | None,
        afresh: bool,
        *saved: Tensor | None,
    ) -> Tensor:
        # On ctx, only what is the same in a recomputation; the seed and the mask are among the saved tensors.
        ctx.recipe, ctx.on_backward, ctx.afresh, ctx.autocast_dtype = recipe, on_backward, afresh, dtype
        ctx.input_shape, ctx.input_dtype = input.shape, input.dtype
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        with torch.autocast(input.device.type, enabled=False):
            b = None if bias is None else _cast(bias, dtype)
            output = F.linear(x, _cast(weight, dtype), b)
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, *saved)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        if torch.is_grad_enabled():
            raise RuntimeError(
                "sketched_linear does not support double backward: its input is not kept, so a backward pass with "
                "create_graph=True cannot be made. Use rmm_linear.revert(model), or exclude the layer."
            )
        weight, *saved = ctx.saved_tensors
        recipe: Recipe | None = ctx.recipe
        grad_input = grad_weight = grad_bias = None
        with torch.autocast(grad_output.device.type, enabled=False):
            y = grad_output.reshape(-1, grad_output.shape[-1])
            if ctx.needs_input_grad[0]:
                grad_input = (y @ _cast(weight, ctx.autocast_dtype)).view(ctx.input_shape).to(ctx.input_dtype)
            if recipe is not None and ctx.needs_input_grad[1]:
                order, count, *kept = saved
                mask = None if order is None else TokenMask(order, count)
                if ctx.on_backward is not None:
                    ctx.on_backward(y, mask)
                if ctx.afresh:
                    gradient = gradient_afresh(y, kept[0], recipe, ctx.input_shape[-1], mask)
                else:
                    gradient = weight_gradient(y, tuple(kept), recipe, ctx.input_shape[-1], mask)
                grad_weight = gradient.to(ctx.weight_dtype)
            if ctx.needs_input_grad[2]:
                grad_bias = y.sum(0).to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, *(None for _ in ctx.needs_input_grad[3:])


class _WithoutGradient(torch.autograd.Function):
    """A weight whose gradient cannot be made; a node of its own, which runs only if the gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        raise RuntimeError(
            "The gradient by the weight needs the layer's input, and a layer in eval mode keeps nothing. "
            "Call model.train() before the forward pass, or rmm_linear.revert(model) for an exact layer."
        )


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast as autocast does: floating point but not float64."""
    if dtype is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)
