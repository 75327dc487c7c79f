"""Elementwise modules that are not known by name: the derivative by a vector of ones, in a few bits per element.

Every element of the output is a function g of one element of the input, so dX = dY ∘ g'(X), and the gradient of the sum
of the outputs is g'(X) itself, which autograd computes from the module's own code. It is stored in few bits and enters
dX linearly: the gradient is unbiased, whatever g is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from rmm_linear._support.autocast import autocast_off
from rmm_linear._support.layouts import is_dense
from rmm_linear.activations.base import PackedModule, SavingCall
from rmm_linear.activations.gated import gated_bits
from rmm_linear.layers.function import SavingFunction, graph_leaves
from rmm_linear.ops.regions import pack_source, unpack_source
from rmm_linear.sketches.seeds import draw_seed


class PackedElementwise(PackedModule):
    """An elementwise module that saves its derivative in few bits. The output is the module's own."""

    rmm_operation = "activation"

    def forward(self, *args: Any, **named: Any) -> Any:
        """Apply the module; exactly in compiled code, which would fix the derivative's graph."""
        input: Any = args[0] if len(args) == 1 and not named else None
        is_tensor = type(input) in (Tensor, nn.Parameter, FakeTensor)  # no logits that are lazy, nor shards
        has_rows = is_tensor and is_dense(input) and input.dim() > 0 and input.is_floating_point()
        if not self.training or torch.compiler.is_compiling() or not has_rows:
            return super().forward(*args, **named)
        call = self._packed_call(tuple(input.shape[:-1]), input.device)
        if call.is_exact or not (torch.is_grad_enabled() and input.requires_grad and input.numel()):
            return super().forward(input)
        return ElementwiseFunction.run(input, super().forward, gated_bits(self.rmm_config), call)


class ElementwiseFunction(SavingFunction):
    """An elementwise function that saves a coded derivative."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, run: Callable[[Tensor], Tensor], bits: int, call: SavingCall) -> Tensor:
        """Apply the function."""
        ctx.call, ctx.bits, ctx.dtype = call, bits, input.dtype
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            leaf = input.detach().requires_grad_()
            output = run(leaf)
            (derivative,) = torch.autograd.grad(output, leaf, torch.ones_like(output))
        with autocast_off(input.device.type):
            stored = pack_source(derivative, bits, draw_seed() if call.seed is None else call.seed, False)
        ctx.save_for_backward(stored)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply by the derivative."""
        (y,), (stored,) = grad_outputs, ctx.saved_tensors
        SavingFunction.received(ctx, y, "a packed activation")
        with autocast_off(y.device.type):
            derivative = unpack_source(stored, list(y.shape), ctx.bits, ctx.dtype, False)
        return (y * derivative).to(ctx.dtype), None, None, None


def _same(tensor: Tensor) -> Tensor:
    return tensor


def is_elementwise(module: nn.Module) -> bool:
    """Say whether a module without parameters computes every element from one, and saves something for it.

    It is tried on a few numbers: a permutation of the input must permute the output, and an element that is changed
    must change no other. A copy is tried, which may remember the call.
    """
    if any(True for _ in module.children()) or any(vars(module)[name] for name in ("_parameters", "_buffers")):
        return False
    numbers = torch.Generator().manual_seed(0)
    x, order = torch.randn(6, 10, generator=numbers) * 3, torch.randperm(60, generator=numbers)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            return all(_is_elementwise(module, x, order, is_training) for is_training in (True, False))
    except Exception:  # of what takes something else
        return False


def _is_elementwise(module: nn.Module, x: Tensor, order: Tensor, is_training: bool) -> bool:
    tried, forward = copy.copy(module), type(module).forward
    tried.training = is_training
    permuted, changed, before = x.flatten()[order].view(6, 10), x.clone(), x.clone()
    changed[2, 3] += 1
    with torch.no_grad():
        y, again = forward(tried, x), forward(tried, before)
        if not isinstance(y, Tensor) or (y.shape, y.dtype) != (x.shape, x.dtype) or y.data_ptr() == x.data_ptr():
            return False
        if not torch.equal(x, before) or not torch.equal(y, again):
            return False
        is_permuted = torch.equal(forward(tried, permuted), y.flatten()[order].view(6, 10))
        others = (forward(tried, changed) != y).sum()
    saved, leaf = list[int](), x.clone().requires_grad_()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes), _same):
        found = forward(tried, leaf)
    is_alone = all(one is leaf for one in graph_leaves([found]))  # no parameter of another module
    return is_permuted and int(others) <= 1 and sum(saved) > 0 and is_alone
