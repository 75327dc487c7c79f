"""Softmax that saves its probabilities in few bits: unbiased gradients, see :mod:`rmm_linear.ops.softmax`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from rmm_linear._support.autocast import autocast_off
from rmm_linear._support.distributed import is_dtensor
from rmm_linear._support.layouts import MemoryLayout, is_dense
from rmm_linear.activations.base import PackedModule, SavingCall
from rmm_linear.layers.function import SavingFunction, as_no_view
from rmm_linear.ops.softmax import pack_softmax, softmax_backward


class PackedSoftmax(PackedModule):
    """``nn.Softmax`` outside of an attention that runs again: it saves its probabilities in ``attention_bits``.

    The output is the module's own. Memory: bits/8 + 1/64 bytes per element. Where a product keeps the probabilities as
    they are, the code frees nothing, and the module is exact from the second step on.
    """

    rmm_operation = "attention"
    rmm_learns_rows = False
    dim: int | None

    def forward(self, input: Tensor) -> Tensor:
        """Apply softmax to an input of any shape."""
        if not self.training or self.dim is None or not is_dense(input) or not input.dim() or is_dtensor(input):
            return super().forward(input)
        call = self._packed_call((), input.device)
        is_saving = torch.is_grad_enabled() and input.requires_grad and input.is_floating_point()
        if call.is_exact or not is_saving or not input.numel():
            return super().forward(input)
        output = SoftmaxFunction.run(input, super().forward, self.dim, self.rmm_config.attention_bits, call)
        return self._survey(input, output, functools.partial(torch.softmax, dim=-1))


class SoftmaxFunction(SavingFunction):
    """Softmax over a dimension, with a code of its probabilities."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, run: Callable[[Tensor], Tensor], dim: int, bits: int, call: SavingCall
    ) -> Tensor:
        """Apply ``run``, which is softmax over ``dim``."""
        output = run(input)
        ctx.call, ctx.dim, ctx.bits, ctx.dtype = call, dim, bits, input.dtype
        with autocast_off(input.device.type):
            stored = pack_softmax(_rows(output, dim), bits, call.seed)
        ctx.save_for_backward(stored)
        if not torch.compiler.is_compiling():
            ctx.stored = TensorWeakRef(stored)  # not held: hooks may have saved something else
        return as_no_view(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (y,), (stored,) = grad_outputs, ctx.saved_tensors
        rows = SavingFunction.received(ctx, _rows(y, ctx.dim), "a packed softmax")
        with autocast_off(y.device.type):
            x = softmax_backward(rows, stored, ctx.bits, ctx.dtype)
        return x.view(y.movedim(ctx.dim, -1).shape).movedim(-1, ctx.dim), None, None, None, None


def code_of(p: Tensor, seed: int | None) -> tuple[Tensor, MemoryLayout, float, float] | None:
    """Return the code of probabilities of a row that a packed softmax has saved, for products of them to save it too.

    With how it lies in memory, its bits, and the mean that was taken out. None of other tensors. Where hooks have saved
    something else, another such code: of a checkpoint's two passes, each may decode what the other has saved.
    """
    if torch.compiler.is_compiling() or type(p.grad_fn).__name__ != "SoftmaxFunctionBackward":
        return None
    node: Any = p.grad_fn
    if node.dim % p.dim() != p.dim() - 1:
        return None
    columns, stored = p.shape[-1], node.stored()
    if stored is None:
        with torch.no_grad(), autocast_off(p.device.type):
            stored = pack_softmax(_rows(p.detach(), -1), node.bits, seed)
    layout = MemoryLayout(tuple(range(p.dim())), tuple(p.shape), p.numel() // columns, columns)
    return stored, layout, node.bits, 1 / columns


def _rows(x: Tensor, dim: int) -> Tensor:
    """Return the elements along a dimension as rows, contiguous."""
    return x.movedim(dim, -1).reshape(-1, x.shape[dim]).contiguous()


def is_softmax(module: nn.Module) -> bool:
    """Say whether a module is ``nn.Softmax`` over a dimension that is said."""
    return isinstance(module, nn.Softmax) and type(module).forward is nn.Softmax.forward and module.dim is not None
