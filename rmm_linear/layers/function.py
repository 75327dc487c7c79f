"""The autograd functions of a linear layer: one saves a sketch of the input, the other saves nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rmm_linear._support.autocast import autocast_off, cast
from rmm_linear.context.host_reads import HostRead
from rmm_linear.context.recomputation import ForwardPass
from rmm_linear.ops.save import weight_gradient_traced
from rmm_linear.ops.sketches import weight_gradient
from rmm_linear.sketches import TokenMask
from rmm_linear.spec import SaveSpec

_unsafe_view = torch.ops.aten._unsafe_view.default


def _apply(
    ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, dtype: torch.dtype | None
) -> Tensor:
    """The exact output; puts on ctx what the exact gradients need, which is the same in a recomputation."""
    ctx.autocast_dtype, ctx.input_shape, ctx.input_dtype = dtype, input.shape, input.dtype
    ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
    with autocast_off(input.device.type):
        output = F.linear(x, cast(weight, dtype), None if bias is None else cast(bias, dtype))
    return as_no_view(output)


def as_no_view(output: Tensor) -> Tensor:
    """Return the output of an autograd function so that it may be written into, which one that is a view may not.

    Args:
        output: A tensor that no one else has, or a view of one, such as the output of a linear layer for more than two
            dimensions. Activations that work in place write into it.

    Returns:
        The same memory.
    """
    return output if output.dim() == 2 else _unsafe_view(output, output.shape)


def _exact_gradients(ctx: Any, y: Tensor, weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The gradients with respect to input and bias from Y, shape (N, O)."""
    grad_input = grad_bias = None
    if ctx.needs_input_grad[0] and weight is not None:
        grad_input = (y @ cast(weight, ctx.autocast_dtype)).view(ctx.input_shape).to(ctx.input_dtype)
    if ctx.needs_input_grad[2]:
        grad_bias = y.sum(0).to(ctx.bias_dtype)
    return grad_input, grad_bias


@dataclass(eq=False)  # frozen, it would take a microsecond more
class SavingCall:
    """What one call of a module needs to save less than its input.

    Attributes:
        seed: Seed of the rounding. None where no random numbers are needed, and in compiled code, where the operator
            draws one.
        mask: The valid tokens, or None for all.
        on_backward: Called with the gradient of the output, shape (N, O), and the mask, before it is used; None where
            nothing is left to check.
        is_exact: Whether no stand-in is to be made, because activation checkpointing would drop it.
        forward_pass: Held by the node, for a recomputation; it notes that its backward pass has begun.
        answers: Of an attention, whether masks of a kind have hidden padding from all valid tokens until now.
        hidden: Whether this call's does, where it relied on such an answer.
    """

    seed: int | None = None
    mask: TokenMask | None = None
    on_backward: Callable[[Tensor, TokenMask | None], None] | None = None
    is_exact: bool = False
    forward_pass: ForwardPass | None = None
    answers: dict[tuple[bool, bool], bool] = field(default_factory=dict)
    hidden: HostRead | None = None

    @property
    def index(self) -> Tensor | None:
        """The rows of valid tokens, int64, shape (n,), whose stand-in is saved; None for all rows."""
        return None if self.mask is None else self.mask.index


class SavingFunction(torch.autograd.Function):
    """Base class of functions that save something else than their input."""

    @classmethod
    def run(cls, *arguments: Any) -> Any:
        """Do what ``apply`` does, which also prepares for torch.func, where nothing of that is running."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():  # pyright: ignore
            return cls.apply(*arguments)
        return super(torch.autograd.Function, cls).apply(*arguments)  # pyright: ignore[reportAttributeAccessIssue]

    @staticmethod
    def received(ctx: Any, y: Tensor, title: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Refuse double backward, and return dY as a matrix, of which ``ctx.call`` is told before it is used."""
        refuse_double_backward(title)
        y = y.reshape((-1, y.shape[-1]) if shape is None else shape)
        call: SavingCall = ctx.call
        if call.on_backward is not None:
            call.on_backward(y, call.mask)
        elif call.forward_pass is not None:
            call.forward_pass.note_backward()
        return y


class SketchedLinearFunction(SavingFunction):
    """The linear layer that computes its weight gradient from a sketch of X."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x: Tensor,
        dtype: torch.dtype | None,
        spec: SaveSpec,
        on_backward: Callable[[Tensor, TokenMask | None], None] | None,
        is_traced: bool,
        *saved: Tensor | None,
    ) -> Tensor:
        """Apply the layer exactly."""
        # The seed and the mask are saved tensors: on ctx, a recomputation could not replace them.
        ctx.spec, ctx.on_backward, ctx.is_traced = spec, on_backward, is_traced
        output = _apply(ctx, input, weight, bias, x, dtype)
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, *saved)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients."""
        (grad_output,) = grad_outputs
        refuse_double_backward()
        weight, order, count, *saved = ctx.saved_tensors
        with autocast_off(grad_output.device.type):
            y = grad_output.reshape(-1, grad_output.shape[-1])
            grad_input, grad_bias = _exact_gradients(ctx, y, weight)
            grad_weight = _weight_gradient(ctx, y, order, count, saved) if ctx.needs_input_grad[1] else None
        return grad_input, grad_weight, grad_bias, *(None,) * (len(ctx.needs_input_grad) - 3)


def _weight_gradient(ctx: Any, y: Tensor, order: Tensor | None, count: Tensor | None, saved: list[Tensor]) -> Tensor:
    mask = None if order is None or count is None else TokenMask(order, count)
    if ctx.on_backward is not None:
        ctx.on_backward(y, mask)
    if ctx.is_traced:
        gradient = weight_gradient_traced(y, saved[0], ctx.spec, ctx.input_shape[-1], mask)
    else:
        gradient = weight_gradient(y, saved, ctx.spec, ctx.input_shape[-1], mask)
    return gradient.to(ctx.weight_dtype)


class UnwatchedLinearFunction(SavingFunction):
    """The same where nothing else looks: no autocast, nor hooks that replace what is saved, so ``ctx`` has the mask."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, spec: SaveSpec, call: SavingCall, *saved: Tensor
    ) -> Tensor:
        """Apply the layer exactly."""
        ctx.spec, ctx.call, ctx.input_shape = spec, call, input.shape
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, *saved)
        if input.dim() == 2 or not input.is_contiguous():
            return as_no_view(F.linear(input, weight, bias))
        output = F.linear(input.view(-1, input.shape[-1]), weight, bias)  # as PyTorch does it, in half of the time
        return _unsafe_view(output, (*input.shape[:-1], output.shape[1]))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients."""
        (grad_output,), (weight, *saved) = grad_outputs, ctx.saved_tensors
        y = SavingFunction.received(ctx, grad_output, "sketched_linear")
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with autocast_off(y.device.type):
            grad_input = torch.mm(y, weight).view(ctx.input_shape) if needs_input else None
            grad_bias = y.sum(0) if needs_bias else None
            grad_weight = None
            if needs_weight:
                grad_weight = weight_gradient(y, saved, ctx.spec, ctx.input_shape[-1], ctx.call.mask)
        return grad_input, grad_weight, grad_bias, *(None,) * (2 + len(saved))


class UnsavedLinearFunction(SavingFunction):
    """The linear layer that saves nothing of X: its gradients are those with respect to input and bias."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        """Apply the layer exactly."""
        output = _apply(ctx, input, weight, bias, cast(input, dtype), dtype)
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients."""
        (grad_output,) = grad_outputs
        refuse_double_backward()
        (weight,) = ctx.saved_tensors
        with autocast_off(grad_output.device.type):
            y = grad_output.reshape(-1, grad_output.shape[-1])
            grad_input, grad_bias = _exact_gradients(ctx, y, weight)
        return grad_input, None, grad_bias, None


class RefusedGradient(torch.autograd.Function):
    """Identity of a weight whose gradient cannot be computed: its node runs, and raises, only if one is needed."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        """Return the weight."""
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        """Raise."""
        raise RuntimeError(
            "The gradient with respect to the weight needs the layer's input, and a layer in eval mode saves nothing. "
            "Call model.train() before the forward pass, or rmm_linear.revert(model) for an exact layer."
        )


def refuse_double_backward(name: str = "sketched_linear") -> None:
    """Refuse a backward pass that is differentiated itself.

    Args:
        name: What does not support it.

    Raises:
        RuntimeError: If grad mode is on.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} does not support double backward: its input is not saved, so a backward pass with "
            "create_graph=True is not possible. Use rmm_linear.revert(model), or exclude the layer."
        )
