"""Dropout that saves one bit per element, with the random numbers of nn.Dropout; or a seed, with its own.

Where a kernel makes the output (``RMMConfig.fused``), it draws from Philox which elements it keeps, in the pass that
applies dropout, and draws them again in the backward pass. Its seed comes from the generator of the device, as the
numbers of ``nn.Dropout`` do, whether gradients are needed or not: what repeats those repeats it, as checkpoints do in
every form, and a graph's replays have others. Layer seeds would not do: which call of a module a checkpoint
recomputes is unknown, and here the output depends on it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional as F

from rmm_linear._support.layouts import as_shape, is_dense
from rmm_linear.activations.base import PackedModule, SavingCall
from rmm_linear.layers.function import SavingFunction
from rmm_linear.ops.dispatch import runs_fused
from rmm_linear.ops.masks import apply_mask, dropout, pack_mask


class PackedDropout(PackedModule):
    """``nn.Dropout`` that saves which elements it kept, one bit for each. Output and gradients are exact.

    With ``RMMConfig.fused``, where kernels run, it saves a seed and keeps other elements than ``nn.Dropout`` would: the
    output is another draw of the same distribution, and the gradients are exact for it.

    Memory: ⌈C/8⌉ bytes for each row of C elements, where ``nn.Dropout`` saves 1, 2 or 4 bytes per element; 8 bytes with
    ``fused``.
    """

    rmm_operation = "dropout"
    p: float
    inplace: bool

    def forward(self, input: Tensor) -> Tensor:
        """Apply dropout to an input of any shape."""
        if not self.training:
            return input if not self.inplace else F.dropout(input, self.p, False, True)
        if not is_dense(input):
            return super().forward(input)
        call = self._packed_call(tuple(input.shape[:-1]), input.device, seeded=False)
        is_plain = not 0 < self.p < 1 or not input.dim() or not input.numel() or not input.is_floating_point()
        # Of a checkpoint, all passes: a parameter is a tensor there.
        if self.rmm_config.fused and not (is_plain or self.inplace) and runs_fused(input.detach(), is_composed=False):
            seed = torch.randint(2**63 - 1, (1,), device=input.device)
            return SeededDropoutFunction.run(input, seed, self.p, call)
        is_saving = torch.is_grad_enabled() and not call.is_exact and input.requires_grad
        if not is_saving or is_plain or (self.inplace and torch.compiler.is_compiling()):
            return F.dropout(input, self.p, self.training, self.inplace)
        return DropoutFunction.run(input, self.p, self.inplace, call)


class DropoutFunction(SavingFunction):
    """Dropout with its mask in one bit per element."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, p: float, inplace: bool, call: SavingCall) -> Tensor:
        output, kept, ctx.scale = _dropout(input, p, inplace)
        if inplace:
            ctx.mark_dirty(input)
        index = call.index
        ctx.call = call
        ctx.save_for_backward(pack_mask(kept.reshape(-1, kept.shape[-1]), index), index)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        y = SavingFunction.received(ctx, grad_output, "a packed nn.Dropout")
        bits, index = ctx.saved_tensors
        return as_shape(apply_mask(y, bits, ctx.scale, index), grad_output.shape), None, None, None


class SeededDropoutFunction(SavingFunction):
    """Dropout that saves the seed of its random numbers."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, seed: Tensor, p: float, call: SavingCall) -> Tensor:
        ctx.call, ctx.p = call, p
        ctx.save_for_backward(seed)
        return dropout(input, seed, p)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        y = SavingFunction.received(ctx, grad_output, "a packed nn.Dropout")
        (seed,) = ctx.saved_tensors
        return as_shape(dropout(y, seed, ctx.p), grad_output.shape), None, None, None


def _dropout(input: Tensor, p: float, inplace: bool) -> tuple[Tensor, Tensor, float]:
    """Return the output of F.dropout to the bit, a tensor that is not zero at kept elements, and their factor."""
    if inplace or (input.device.type == "cpu" and not torch.compiler.is_compiling()):
        noise = torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)
        return input.mul_(noise) if inplace else input * noise, noise, _scale(input.dtype, p)
    output, kept = torch.native_dropout(input, p, True)
    return output, kept, 1 / (1 - p)


@functools.lru_cache(maxsize=64)
def _scale(dtype: torch.dtype, p: float) -> float:
    """Return PyTorch's factor of kept elements, rounded to their dtype."""
    with torch.inference_mode(False), unset_fake_temporarily():
        return float(torch.ones((), dtype=dtype, device="cpu").div_(1 - p))


def is_dropout(module: nn.Module) -> bool:
    """Say whether a module is ``nn.Dropout`` itself."""
    return type(module) is nn.Dropout
