"""Pointwise activations that save their derivative in few bits, and the search for a module's function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear._support.layouts import MemoryLayout, as_shape, is_dense
from rmm_linear.activations.base import PackedModule, SavingCall
from rmm_linear.config import RMMConfig
from rmm_linear.context.model_context import ModelContext
from rmm_linear.layers.converted import original_of
from rmm_linear.layers.function import SavingFunction, square_of
from rmm_linear.ops.derivatives import activate_and_pack, apply_derivative, pack_derivative
from rmm_linear.ops.dispatch import is_read, runs_fused
from rmm_linear.packing import sum_dtype
from rmm_linear.packing.pointwise import FUNCTIONS, Pointwise

_TORCH: dict[type[nn.Module], Callable[[Any], Pointwise]] = {
    nn.GELU: lambda module: Pointwise("gelu" if module.approximate == "none" else "gelu_tanh"),
    nn.SiLU: lambda module: Pointwise("silu"),
    nn.ReLU: lambda module: Pointwise("relu"),
    nn.Mish: lambda module: Pointwise("mish"),
    nn.Hardswish: lambda module: Pointwise("hardswish"),
    nn.Sigmoid: lambda module: Pointwise("sigmoid"),
    nn.Tanh: lambda module: Pointwise("tanh"),
    nn.ELU: lambda module: Pointwise("elu", (float(module.alpha),)),
    nn.LeakyReLU: lambda module: Pointwise("leaky_relu", (float(module.negative_slope),)),
    nn.Hardtanh: lambda module: Pointwise("hardtanh", (float(module.min_val), float(module.max_val))),
    nn.ReLU6: lambda module: Pointwise("hardtanh", (float(module.min_val), float(module.max_val))),
}
_UNPARAMETERIZED = [name for name in FUNCTIONS if name not in ("elu", "leaky_relu", "hardtanh")]
SEQUENCES = 3  # dimensions, of tokens
_TOLERANCE = 1e-7  # constants that a model writes with ten digits, not another function
_found: dict[tuple[Any, ...], Pointwise | None] = {}


class PackedActivation(PackedModule):
    """A pointwise activation that saves its derivative in few bits instead of its input.

    The output is that of the module itself, to the bit, unless ``RMMConfig.fused`` lets a kernel make it that rounds
    otherwise; modules that work in place stay as they are, and those that are composed of several of PyTorch's
    functions do under autocast, which gives each its own dtype. The gradient by the input is unbiased, see
    :mod:`rmm_linear.packing.derivatives`; of ReLU, LeakyReLU, Hardtanh and ReLU6 it is exact, and one pass makes output
    and bits.

    Memory: ⌈C · bits / 8⌉ bytes for each row of C elements. Modules that work in place do so, except that in compiled
    code they save what they saved before.
    """

    rmm_operation = "activation"
    rmm_bits: int  # bits per element, 8, 4, 2 or 1; those whose gradient is exact always take 1, ReLU² at least 2
    rmm_function: Pointwise  # what the module computes, found when it is set up and when one of its attributes changes
    rmm_is_composed: bool  # whether it computes that by several functions

    def _set_up(
        self, config: RMMConfig | None, context: ModelContext | None = None, index: int = 0, bits: int = 4
    ) -> None:
        super()._set_up(config, context, index)
        self.rmm_bits = bits
        function = pointwise_function(self)
        if function is None:
            raise TypeError(f"{type(self).__name__} is no pointwise function that is known. Leave it as it is.")
        self.rmm_function, self.rmm_is_composed = function, is_composed(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Follow a change of what the activation computes, such as another slope; ValueError where it is unknown."""
        if name == "training" or name.startswith(("_", "rmm_")):
            return super().__setattr__(name, value)
        before: Any = getattr(self, name, None)
        kind = original_of(type(self))
        super().__setattr__(name, value)
        found = _TORCH[kind](self) if kind in _TORCH else _try_on_grid(kind, self)
        if found is None:
            delattr(self, name)
            super().__setattr__(name, before)
            raise ValueError(
                f"A converted activation must stay one whose derivative is known, got {name}={value!r} of a "
                f"{kind.__name__}. Call rmm_linear.revert(model), change it and convert the model again."
            )
        self.rmm_function, self.rmm_is_composed = found, is_composed(self)
        return None

    def _take_bits(self, bits: int) -> None:
        self.rmm_bits = bits

    def forward(self, input: Tensor) -> Tensor:
        """Apply the activation to an input of any shape."""
        if not self.training or not is_dense(input):
            return super().forward(input)
        call = self._packed_call(tuple(input.shape[:-1]), input.device, seeded=not self.rmm_function.is_exact)
        is_saving = torch.is_grad_enabled() and not call.is_exact and input.requires_grad
        is_saving = is_saving and input.dim() and input.is_floating_point()
        is_inplace = getattr(self, "inplace", False)
        if not is_saving or not input.shape[-1] or (is_inplace and torch.compiler.is_compiling()):
            return super().forward(input)
        bits = self.rmm_function.bits(self.rmm_bits)
        exact = None if not is_inplace and self._is_fused(input, call) else super().forward
        output = PointwiseFunction.run(input, exact, is_inplace, self.rmm_function, bits, call)
        return self._survey(input, output, super().forward)

    def _is_fused(self, input: Tensor, call: SavingCall) -> bool:
        """Say whether the pass that packs makes the output: as configured, and where it is PyTorch's to the bit."""
        if self.rmm_config.fused and runs_fused(input, self.rmm_is_composed):
            return True
        is_whole = call.mask is None and (input.dim() > SEQUENCES or input.is_contiguous())
        return self.rmm_function.is_exact and is_whole and is_read(input)


class PointwiseFunction(SavingFunction):
    """A pointwise function with its derivative in few bits."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        exact: Callable[[Tensor], Tensor] | None,
        is_inplace: bool,
        function: Pointwise,
        bits: int,
        call: SavingCall,
    ) -> Tensor:
        """Apply the function: ``exact``, or if it is None, the one that makes its codes in the same pass."""
        index = call.index
        ctx.call, ctx.dtype = call, input.dtype
        ctx.stored_as = function.name, function.parameters, bits
        # Images have short rows, and perhaps channels in memory first.
        ctx.layout = MemoryLayout.of(input) if index is None and input.dim() > SEQUENCES else None
        rows = input.reshape(-1, input.shape[-1]) if ctx.layout is None else ctx.layout.matrix(input)
        if exact is None:
            output, stored = activate_and_pack(rows, index, call.seed, *ctx.stored_as)
            ctx.save_for_backward(stored, index)
            return as_shape(output, input.shape) if ctx.layout is None else ctx.layout.tensor(output)
        # Before the function may overwrite its input.
        ctx.save_for_backward(pack_derivative(rows, index, call.seed, *ctx.stored_as), index)
        output = exact(input)
        if is_inplace:
            ctx.mark_dirty(input)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        y, (stored, index) = grad_output if ctx.layout is None else ctx.layout.matrix(grad_output), ctx.saved_tensors
        y = SavingFunction.received(ctx, y, "a packed activation")
        grad_input = apply_derivative(y, stored, index, *ctx.stored_as)
        grad_input = as_shape(grad_input, grad_output.shape) if ctx.layout is None else ctx.layout.tensor(grad_input)
        function = Pointwise(*ctx.stored_as[:2])
        if ctx.call.noise is not None and function.is_bounded and not function.is_exact:
            variance = function.step(ctx.stored_as[2]) ** 2 / 12 * square_of(y)
            sums = square_of_sums(grad_input, None if ctx.layout is None else 1)
            ctx.call.noise(variance, sums, ctx.stored_as[2])
        return grad_input.to(ctx.dtype), None, None, None, None, None


def square_of_sums(gradient: Tensor, channel: int | None = None) -> Tensor:
    """Return the squared norm of the sums over all dimensions but that of channels, the last one by default.

    A tensor of four dimensions or more is taken for an image, whose channels are its second one.
    """
    channel = gradient.dim() - 1 if channel is None else channel
    others = [dim for dim in range(gradient.dim()) if dim != channel]
    sums = gradient.sum(others, dtype=sum_dtype(gradient.dtype)) if others else gradient
    return square_of(sums)


def is_composed(module: nn.Module) -> bool:
    """Say whether an activation is composed of several functions, of which autocast computes some in float32.

    Which ones differs between devices, so the functions are counted, and not what the CPU's autocast does. PyTorch's
    own classes, and those that call one of its functions such as transformers' GELUActivation, are not composed: their
    output has the dtype of the input, under autocast too.
    """
    kind = original_of(type(module))
    if kind in _TORCH:
        return False
    x = torch.linspace(-4, 4, 16, dtype=torch.bfloat16, device="cpu")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), _Counted() as counted:
        try:
            output = kind.forward(module, x)
        except Exception:  # of a module that is known, but not in half types
            return True
    return counted.calls != 1 or not isinstance(output, Tensor) or output.dtype != x.dtype


class _Counted(TorchDispatchMode):
    """Counts the calls of operators, below autocast: its casts too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **kwargs or {})


def pointwise_function(module: nn.Module) -> Pointwise | None:
    """Find the pointwise function that a module computes; None for an unknown one.

    PyTorch's own classes say it by their class and attributes. The classes of transformers' ``ACT2FN``, if it is
    imported, are tried on a grid in float64, function values and derivatives; modules with parameters are not.
    """
    kind = original_of(type(module))
    if kind in _TORCH:
        return _TORCH[kind](module)
    if kind not in _transformers_classes() or any(True for _ in module.parameters()):
        return None
    settings = {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str)}
    settings = {name: value for name, value in settings.items() if name != "training" and not name.startswith("rmm_")}
    key = kind, *sorted(settings.items())
    if key not in _found:
        _found[key] = _try_on_grid(kind, module)
    return _found[key]


def _transformers_classes() -> set[type]:
    """Return the classes of ACT2FN: its values, or the first of a pair of class and arguments."""
    activations = sys.modules.get("transformers.activations")
    known = getattr(activations, "ACT2FN", {})
    return {value[0] if isinstance(value, tuple) else value for value in dict.values(known)}


def _try_on_grid(kind: type[nn.Module], module: nn.Module) -> Pointwise | None:
    """Return the known function that has the same values and derivatives; hooks of the module do not run."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        x = torch.linspace(-40, 40, 8001, dtype=torch.float64, device="cpu") + 1 / 3
        x.requires_grad_()
        try:
            y = kind.forward(module, x)
            (slope,) = torch.autograd.grad(y.sum(), x)
        except (RuntimeError, TypeError, ValueError):
            return None
        for function in map(Pointwise, _UNPARAMETERIZED):
            expected = function(x)
            near = (torch.isclose(y, expected, _TOLERANCE, _TOLERANCE), torch.isclose(slope, function.derivative(x)))
            if y.shape == x.shape and y.dtype == x.dtype and bool(torch.stack(near).all()):
                return function
    return None
