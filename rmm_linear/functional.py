"""sketched_linear: a linear layer that keeps a sketch of its input for the backward pass.

    forward    out = X Wᵀ + b (exact)    keep Z = SᵀX, the seed of S, and W
    backward   dX = Y W (exact)   db = Yᵀ1 (exact)   dW = (SᵀY)ᵀ Z

E[S Sᵀ] = 1 makes E[dW] = YᵀX: the gradient is unbiased, whatever Y is.

Source: Bershatsky et al. 2022, arXiv 2201.13195, algorithm 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rmm_linear.config import RMMConfig
from rmm_linear.seeds import draw_seed
from rmm_linear.sketches import sketch


def sketched_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, config: RMMConfig, seed: int | None = None
) -> Tensor:
    """Apply ``input @ weight.T + bias`` and keep K rows of a sketch for the backward pass instead of the input.

    Exact: the output, the gradient by the input and the gradient by the bias. Random and unbiased: the gradient by the
    weight. Nothing is kept when the weight is frozen or grad mode is off; K ≥ N keeps the input itself and is exact.

    Memory: K·I elements and one seed, with K = ``config.rows(N)``. Time: the weight gradient costs K/N of the exact one,
    the sketches of X and Y come on top (one pass each for countsketch).

    Args:
        input: Activations X, shape (*, I); N is the product of the leading dimensions.
        weight: Shape (O, I).
        bias: Shape (O,), or None.
        config: Kind, ratio, block and min_rows of the sketch; its module patterns are not used here.
        seed: Seed of S, a 64-bit integer. None draws one from torch's global CPU generator, whether grad mode is on or not,
            so that later random numbers do not depend on it.

    Returns:
        Shape (*, O). Equal to the output of ``torch.nn.functional.linear`` to the bit.

    Example:
        >>> import torch
        >>> x, w = torch.randn(512, 8), torch.randn(4, 8, requires_grad=True)
        >>> sketched_linear(x, w, config=RMMConfig(ratio=0.25), seed=0).sum().backward()
        >>> w.grad.shape
        torch.Size([4, 8])
    """
    if not weight.requires_grad:
        return F.linear(input, weight, bias)
    if input.dim() == 0 or input.shape[-1] != weight.shape[-1]:
        return F.linear(input, weight, bias)  # torch's own error
    tokens = input.shape[:-1].numel()
    rows = config.rows(tokens)
    if rows >= tokens:
        return F.linear(input, weight, bias)
    if seed is None:
        seed = draw_seed()
    if not torch.is_grad_enabled():
        return F.linear(input, weight, bias)
    return _apply(input, weight, bias, config, rows, seed)


def evaluated_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply ``input @ weight.T + bias`` and keep nothing, as a layer in eval mode does.

    The gradients by input and bias are exact; asking for the gradient by the weight raises in the backward pass.

    Args:
        input: Activations X, shape (*, I).
        weight: Shape (O, I).
        bias: Shape (O,), or None.

    Returns:
        Shape (*, O).
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return F.linear(input, weight, bias)
    return _apply(input, weight, bias, None, 0, 0)


def _apply(
    input: Tensor, weight: Tensor, bias: Tensor | None, config: RMMConfig | None, rows: int, seed: int
) -> Tensor:
    device_type = input.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    return _SketchedLinear.apply(input, weight, bias, config, rows, seed, dtype)


class _SketchedLinear(torch.autograd.Function):
    """The linear layer whose backward pass needs Z, not X; ``config=None`` keeps nothing at all."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        config: RMMConfig | None,
        rows: int,
        seed: int,
        autocast_dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.config, ctx.rows, ctx.autocast_dtype = config, rows, autocast_dtype
        ctx.input_shape, ctx.input_dtype = input.shape, input.dtype
        with torch.autocast(input.device.type, enabled=False):
            x, w = _cast(input, autocast_dtype), _cast(weight, autocast_dtype)
            b = None if bias is None else _cast(bias, autocast_dtype)
            output = F.linear(x, w, b)
            sketched = seeds = None
            if config is not None:
                # The seed travels with Z: a recomputation under checkpointing replaces both, or neither.
                seeds = torch.full((1,), seed, dtype=torch.int64, device=input.device)
                x = x.reshape(-1, x.shape[-1])
                sketched = sketch(x, kind=config.kind, seed=seeds, rows=rows, block=config.block)
        ctx.save_for_backward(sketched, seeds, weight if ctx.needs_input_grad[0] else None)
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise RuntimeError(
                "sketched_linear does not support double backward: its input is not kept, so a backward pass with "
                "create_graph=True cannot be made. Use rmm_linear.revert(model), or exclude the layer from the conversion."
            )
        sketched, seeds, weight = ctx.saved_tensors
        grad_input = grad_weight = grad_bias = None
        with torch.autocast(grad_output.device.type, enabled=False):
            y = grad_output.reshape(-1, grad_output.shape[-1])
            if ctx.needs_input_grad[0]:
                grad_input = (y @ _cast(weight, ctx.autocast_dtype)).view(ctx.input_shape).to(ctx.input_dtype)
            if ctx.needs_input_grad[1]:
                if sketched is None:
                    raise RuntimeError(
                        "The gradient by the weight needs the layer's input, and a layer in eval mode keeps nothing. "
                        "Call model.train() before the forward pass; for gradients in eval mode use rmm_linear.revert(model)."
                    )
                config = ctx.config
                sketched_y = sketch(y, kind=config.kind, seed=seeds, rows=ctx.rows, block=config.block)
                grad_weight = (sketched_y.T @ sketched).to(ctx.weight_dtype)
            if ctx.needs_input_grad[2]:
                grad_bias = y.sum(0).to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast as autocast does: floating point but not float64."""
    if dtype is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)
