"""Apply linear layers that save a sketch of their input, or nothing of it: sketched_linear and its functions.

    forward    out = X Wᵀ + b (exact)    save Z = pack(SᵀX), the seed of S, and W
    backward   dX = Y W (exact)   db = Yᵀ1 (exact)   dW = (SᵀY)ᵀ unpack(Z)

E[S Sᵀ] = 1 and E[unpack(pack(Z)) | Z] = Z make E[dW] = YᵀX: the gradient is unbiased, whatever Y is.

Source: Bershatsky et al. 2022, arXiv 2201.13195, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from rmm_linear._support.autocast import autocast_dtype, autocast_off, cast
from rmm_linear._support.layouts import as_shape
from rmm_linear.config import RMMConfig
from rmm_linear.context.call_inputs import HostRead
from rmm_linear.context.directions import Directions
from rmm_linear.context.recomputation import ForwardPass
from rmm_linear.context.sketch_cache import SketchCache
from rmm_linear.context.surroundings import has_saving_hooks
from rmm_linear.ops.save import save_input, save_traced, weight_gradient_traced
from rmm_linear.ops.sketches import weight_gradient
from rmm_linear.packing import rounding_variance, sum_dtype
from rmm_linear.sketches import TokenMask, row_norms
from rmm_linear.sketches.seeds import draw_seed, is_capturing
from rmm_linear.spec import SaveSpec


def _apply(
    ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, dtype: torch.dtype | None
) -> Tensor:
    """Return the exact output; puts on ctx what the exact gradients need, which is the same in a recomputation."""
    ctx.autocast_dtype, ctx.input_shape, ctx.input_dtype = dtype, input.shape, input.dtype
    ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
    with autocast_off(input.device.type):
        output = F.linear(x, cast(weight, dtype), None if bias is None else cast(bias, dtype))
    return as_no_view(output)


def as_no_view(output: Tensor) -> Tensor:
    """Return an autograd function's output so that it may be written into, which one that is a view may not.

    ``output`` is a tensor that nothing else has, or a view of one, such as the output of a linear layer for more than
    two dimensions. Activations that work in place write into it.
    """
    if output.dim() == 2:
        return output
    if output.dim() > 3:  # images, whose memory format shows in their strides
        if torch.compiler.is_compiling():
            return as_new(output)
        if not output._is_view():
            return output
    return as_shape(output, output.shape)


def as_new(output: Tensor) -> Tensor:
    """Return what compiled code takes for another tensor, with the same strides.

    Without a copy, unless there is a dimension of size 1, whose stride would be lost: with that of one image, its
    ``channels_last``.
    """
    is_lost = output.dim() > 3 and 1 in output.shape and not output.is_contiguous()
    return output.clone() if is_lost else as_shape(output, output.shape)


def _exact_gradients(ctx: Any, y: Tensor, weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients with respect to input and bias from Y, shape (N, O)."""
    grad_input = grad_bias = None
    if ctx.needs_input_grad[0] and weight is not None:
        # As no view, so that autograd adds the gradient of a residual connection in place.
        grad_input = as_shape(y @ cast(weight, ctx.autocast_dtype), ctx.input_shape).to(ctx.input_dtype)
    if ctx.needs_input_grad[2]:
        grad_bias = y.sum(0).to(ctx.bias_dtype)
    return grad_input, grad_bias


@dataclass(eq=False)  # frozen, it would take a microsecond more
class SavingCall:
    """The state of one call of a module that saves a compressed activation."""

    # Seed of the rounding. None where no random numbers are needed, and in compiled code, where the operator draws one.
    seed: int | None = None
    mask: TokenMask | None = None  # the valid tokens, or None for all
    # Called with the gradient of the output, shape (N, O), and the mask, before it is used; None where nothing is left
    # to check
    on_backward: Callable[[Tensor, TokenMask | None], None] | None = None
    is_exact: bool = False  # whether nothing is compressed, because activation checkpointing would drop it
    # Held by the node, for a recomputation; it notes that its backward pass has begun
    forward_pass: ForwardPass | None = None
    # Called with the noise of a code, the squared norm of its gradient, its width and perhaps its place, in the first
    # steps: see context.code_noise
    noise: Callable[..., None] | None = None
    # Of an attention, by whether there was no mask and whether it was causal: whether such masks have hidden padding
    # from every valid token so far, and the first node of the forward pass that found out
    answers: dict[tuple[bool, bool], tuple[bool, int | None]] = field(default_factory=dict)
    # What the device says of this call's mask, for the backward pass to check; None if nothing was assumed
    hidden: HostRead | None = None
    is_pattern: bool = False  # whether the mask leaves out more than padding, see context.learned

    @property
    def index(self) -> Tensor | None:
        """The rows of valid tokens, int64, shape (n,), that are saved compressed; None for all rows."""
        return None if self.mask is None else self.mask.index


class SavingFunction(torch.autograd.Function):
    """Base class of functions that save something else than their input."""

    plain_apply: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls) -> None:
        """Look up once what ``apply`` calls after it has prepared for torch.func."""
        super().__init_subclass__()
        cls.plain_apply = super(torch.autograd.Function, cls).apply  # pyright: ignore[reportAttributeAccessIssue]

    @classmethod
    def run(cls, *arguments: Any) -> Any:
        """Do what ``apply`` does, which also prepares for torch.func, where nothing of that is running."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():  # pyright: ignore
            return cls.apply(*arguments)
        return cls.plain_apply(*arguments)

    @staticmethod
    def received(ctx: Any, y: Tensor, title: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Refuse double backward, and return Y as a matrix, of which ``ctx.call`` is told before it is used."""
        refuse_double_backward(title)
        if shape is not None or y.dim() != 2:
            y = y.reshape((-1, y.shape[-1]) if shape is None else shape)
        call: SavingCall = ctx.call
        if call.on_backward is not None:
            call.on_backward(y, call.mask)
        elif call.forward_pass is not None:
            call.forward_pass.note_backward(y, call.mask)
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
        noise: Callable[[Tensor, Tensor], None] | None,
        is_traced: bool,
        valid: int | None,
        *saved: Tensor | None,
    ) -> Tensor:
        """Apply the layer exactly."""
        # The seed and the mask are saved tensors: on ctx, a recomputation could not replace them.
        ctx.spec, ctx.on_backward, ctx.noise, ctx.is_traced, ctx.valid = spec, on_backward, noise, is_traced, valid
        output = _apply(ctx, input, weight, bias, x, dtype)
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, *saved)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        refuse_double_backward()
        weight, order, count, *saved = ctx.saved_tensors
        with autocast_off(grad_output.device.type):
            y = grad_output.reshape(-1, grad_output.shape[-1])
            grad_input, grad_bias = _exact_gradients(ctx, y, weight)
            grad_weight = _weight_gradient(ctx, y, order, count, saved) if ctx.needs_input_grad[1] else None
        return grad_input, grad_weight, grad_bias, *(None,) * (len(ctx.needs_input_grad) - 3)


def square_of(gradient: Tensor) -> Tensor:
    """Return the squared norm of a gradient, without a copy of it."""
    return torch.linalg.vector_norm(gradient, dtype=sum_dtype(gradient.dtype)).double().square()


def _weight_gradient(ctx: Any, y: Tensor, order: Tensor | None, count: Tensor | None, saved: list[Tensor]) -> Tensor:
    mask = None if order is None or count is None else TokenMask(order, count)
    if mask is not None and ctx.valid is not None:
        mask.know_count(ctx.valid)
    if ctx.on_backward is not None:
        ctx.on_backward(y, mask)
    if ctx.is_traced:
        gradient = weight_gradient_traced(y, saved[0], ctx.spec, ctx.input_shape[-1], mask)
    else:
        gradient = weight_gradient(y, saved, ctx.spec, ctx.input_shape[-1], mask)
    if ctx.noise is not None:
        norms = row_norms(y) if mask is None else row_norms(y).index_select(0, mask.index)
        variance = rounding_variance(saved[1], ctx.input_shape[-1]) @ norms.double().square()
        ctx.noise(variance, square_of(gradient), ctx.spec.bits)
    return gradient.to(ctx.weight_dtype)


class UnwatchedLinearFunction(SavingFunction):
    """The same where nothing else looks: no autocast, nor hooks that replace what is saved, so ``ctx`` has the mask."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        spec: SaveSpec,
        call: SavingCall,
        save: Callable[[Tensor], tuple[Tensor, ...]],
    ) -> Tensor:
        """Apply the layer exactly; ``save`` returns what is saved of X, shape (N, I)."""
        ctx.spec, ctx.call, ctx.input_shape = spec, call, input.shape
        rows = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, *save(rows))
        if input.dim() != 3 or not input.is_contiguous():
            return as_no_view(F.linear(input, weight, bias))
        output = F.linear(rows, weight, bias)  # as PyTorch does it, in half of the time
        return output.resize_(*input.shape[:-1], output.shape[1])  # which is no view

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,), (weight, *saved) = grad_outputs, ctx.saved_tensors
        y = SavingFunction.received(ctx, grad_output, "sketched_linear")
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with autocast_off(y.device.type):
            grad_input = as_shape(torch.mm(y, weight), ctx.input_shape) if needs_input else None
            grad_bias = y.sum(0) if needs_bias else None
            grad_weight = None
            if needs_weight:
                grad_weight = weight_gradient(y, saved, ctx.spec, ctx.input_shape[-1], ctx.call.mask)
        return grad_input, grad_weight, grad_bias, None, None, None


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
    """Refuse a backward pass that is differentiated itself."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} does not support double backward: its input is not saved, so a backward pass with "
            "create_graph=True is not possible. Use rmm_linear.revert(model), or exclude the layer."
        )


@dataclass(eq=False)  # frozen, it would take a microsecond more
class LinearCall:
    """How one call of one layer saves its input."""

    spec: SaveSpec  # how the input is saved
    seed: int | None  # Seed of S and of the rounding. None in compiled code, where an operator draws one in every step.
    dtype: torch.dtype | None = None  # the dtype that autocast runs the layer in, or None while it is off
    mask: TokenMask | None = None  # the valid tokens, or None for all
    cache: SketchCache | None = None  # sketches that other layers made in this forward pass, or None to share nothing
    index: int = 0
    # Returns ŷ, the expected norms ‖yᵢ‖, float32, shape (N,), or None without a prediction. Called only where a sketch
    # is made, so once for all layers that share it. None is a call without predictions.
    expected: Callable[[], Tensor | None] | None = None
    # Called with Y, shape (N, O), and the mask, before the weight gradient is computed from them
    on_backward: Callable[[Tensor, TokenMask | None], None] | None = None
    directions: Directions | None = None  # the fixed directions of the input; None for none
    noise: Callable[[Tensor, Tensor], None] | None = None  # as of SavingCall

    @property
    def index_of_rows(self) -> Tensor | None:
        """The rows that are saved, int64, shape (n,); None for all."""
        return None if self.mask is None else self.mask.index


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
            is false and not saved. Shape (*), as the leading dimensions of ``input``. It is not checked: a masked row
            with a gradient would be missing from dW. The host waits for the number of valid rows.

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
    itemsize = (dtype or input.dtype).itemsize
    spec = spec_for(input.shape, itemsize, weight, config)
    if spec is None:
        return F.linear(input, weight, bias)
    mask = None if token_mask is None else TokenMask.of(token_mask.reshape(-1))
    if not torch.compiler.is_compiling():
        seed = draw_seed() if seed is None else seed
        if mask is not None and not (is_capturing(input.device) or isinstance(mask.count, FakeTensor)):
            spec = spec_for(input.shape, itemsize, weight, config, mask.valid_count) or spec
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
    shape: torch.Size, itemsize: int, weight: Tensor, config: RMMConfig, valid: int | None = None
) -> SaveSpec | None:
    """Return how a layer saves its input of shape (*, I), from shapes and dtypes alone.

    None if the layer is exact: frozen, empty or complex weight, few tokens, or a shape that torch will refuse.
    ``valid`` is the number of rows that are no padding, or None for all.
    """
    is_trained = weight.requires_grad and not weight.is_complex()
    return spec_of(shape, itemsize, weight.shape, is_trained, config, valid)


def spec_of(
    shape: torch.Size, itemsize: int, weight: torch.Size, is_trained: bool, config: RMMConfig, valid: int | None
) -> SaveSpec | None:
    """As :func:`spec_for`, from the shape of the weight and whether it is trained."""
    if not is_trained or 0 in weight or not shape or shape[-1] != weight[-1]:
        return None
    return config.spec(shape[:-1].numel(), shape[-1], itemsize, valid)


def saved_linear(input: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
    """Apply ``input @ weight.T + bias`` to activations X, shape (*, I), and save what ``call`` describes."""
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return F.linear(input, weight, bias)
    x = input.detach() if call.dtype is None else cast(input.detach(), call.dtype)
    # Made outside of the autograd function, so that layers can share it: compilers let autograd functions share nothing
    # but their inputs.
    saved = _saved(input, weight, x, call)
    ranks = (None, None) if call.mask is None else (call.mask.order, call.mask.count)
    is_traced = call.seed is None
    # What the host has read; not under hooks, as a recomputation may replace the mask.
    is_known = call.mask is not None and not torch.compiler.is_compiling() and not has_saving_hooks()
    valid = vars(call.mask).get("valid_count") if is_known else None
    return SketchedLinearFunction.run(
        input, weight, bias, x, call.dtype, call.spec, call.on_backward, call.noise, is_traced, valid, *ranks, *saved
    )


def _saved(input: Tensor, weight: Tensor, x: Tensor, call: LinearCall) -> tuple[Tensor, ...]:
    """Return the tensors that are saved of X; a recomputation by checkpointing replaces all of them."""
    entry = None
    if call.cache is not None:
        count = 0 if call.directions is None else call.directions.count
        entry = call.cache.entry(input, weight, (f"{call.spec!r} {count}", call.mask, call.dtype), call.index)
        if entry.saved is not None:
            return entry.saved
    with torch.no_grad(), autocast_off(x.device.type):
        if call.seed is None:
            return (save_traced(cast(input, call.dtype), call.spec, call.mask),)  # not a view: see save_traced
        expected = None if call.expected is None else call.expected()
        rows = x.reshape(-1, x.shape[-1])
        basis = None if call.directions is None else call.directions.basis_for(rows, call.index_of_rows)
        saved = save_input(rows, call.spec, call.mask, call.seed, expected, basis)
    if entry is not None:
        entry.saved = saved
    return saved


def unsaved_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply ``input @ weight.T + bias`` and save nothing of the input, as a layer in eval mode does.

    Exact: the output and the gradients with respect to input and bias. A backward pass that needs the gradient with
    respect to the weight raises.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return F.linear(input, weight, bias)
    return UnsavedLinearFunction.run(
        input, RefusedGradient.apply(weight), bias, autocast_dtype(input.device.type, input.dtype)
    )
