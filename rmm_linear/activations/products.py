"""Modules that call ``F.linear`` with a weight of their own, as routers of experts do: a sketch of its input."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from rmm_linear._support.autocast import autocast_dtype
from rmm_linear._support.distributed import is_dtensor, shape_of
from rmm_linear._support.layouts import is_dense
from rmm_linear.activations.base import PackedModule
from rmm_linear.layers.function import LinearCall, saved_linear, spec_for
from rmm_linear.sketches.seeds import draw_seed


class PackedProduct(PackedModule):
    """A module whose code multiplies by its weight through ``F.linear``, whose input is saved as a linear layer's is.

    The output and the gradient with respect to the input are exact, that of the weight is unbiased. All rows are saved,
    those of padding too, which a loss of routing may count.
    """

    rmm_operation = "linear"
    rmm_learns_rows = False

    def forward(self, *args: Any, **named: Any) -> Any:
        """Run the module's own forward; exactly in compiled code, which would fix the seeds."""
        if not self.training or torch.compiler.is_compiling():
            return super().forward(*args, **named)
        with _Products(self):
            return super().forward(*args, **named)

    def _product(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        call = self._packed_call(tuple(input.shape[:-1]), input.device)
        dtype = autocast_dtype(input.device.type, input.dtype)
        spec = spec_for(input.shape, (dtype or input.dtype).itemsize, weight, self.rmm_config)
        if spec is None or call.is_exact or not torch.is_grad_enabled():
            return F.linear(input, weight, bias)
        held = call.forward_pass
        seen = LinearCall(
            spec, draw_seed() if call.seed is None else call.seed, dtype,
            on_backward=None if held is None else lambda *_: held.note_backward(),
        )  # fmt: skip
        output = saved_linear(input, weight, bias, seen)
        return self._survey(input, output) if dtype in (None, input.dtype) else output


class _Products(TorchFunctionMode):
    """Replaces the calls of ``F.linear`` with a module's own weight, or a cast of it."""

    def __init__(self, module: PackedProduct) -> None:
        super().__init__()
        self.module = module

    def _is_own(self, weight: Tensor) -> bool:
        """Say whether a weight is the module's own, or a cast of it."""
        node = weight.grad_fn
        if node is not None and node.name() == "ToCopyBackward0":
            weight = getattr(node.next_functions[0][0], "variable", weight)
        return any(weight is one for one in self.module._parameters.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
            weight, input = given["weight"], given["input"]
            has_rows = is_dense(input) and not input.is_complex()
            is_own = has_rows and weight.dim() == 2 and self._is_own(weight)
            if is_own and not any(map(is_dtensor, (weight, input))):
                return self.module._product(**given)
        return func(*args, **(kwargs or {}))


def multiplies(module: nn.Module) -> bool:
    """Say whether a module's own code names ``linear``, and it has one matrix of its own."""
    own = [
        one for one in module._parameters.values() if one is not None and not is_lazy(one) and len(shape_of(one)) > 1
    ]
    if len(own) != 1 or len(shape_of(own[0])) != 2 or 1 in shape_of(own[0]) or not own[0].is_floating_point():
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "linear" in code.co_names and "linear" not in module._modules
