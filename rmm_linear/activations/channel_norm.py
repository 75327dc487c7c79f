"""BatchNorm, GroupNorm and InstanceNorm that save a packed copy of the normalized input: unbiased gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from rmm_linear._support.autocast import autocast_off
from rmm_linear._support.distributed import is_dtensor
from rmm_linear._support.layouts import LAST, MemoryLayout, as_shape, is_channels_last, is_dense, permuted
from rmm_linear.activations.base import PackedModule, SavingCall
from rmm_linear.layers.function import SavingFunction, as_new, as_no_view
from rmm_linear.ops.channel_norms import channel_backward, pack_channels
from rmm_linear.ops.convolutions import decode_matrix, encode_matrix
from rmm_linear.packing.channel_norms import sets_of
from rmm_linear.packing.norms import few_elements
from rmm_linear.sketches.seeds import draw_seed

_FEW_CHANNELS = 16
_FORWARDS = (_BatchNorm.forward, _InstanceNorm.forward, nn.GroupNorm.forward)


class _ChannelNorm(NamedTuple):
    """The arguments of a call that are not tensors."""

    groups: int
    eps: float
    bits: int
    is_last: bool
    is_rearranged: bool
    call: SavingCall


class PackedChannelNorm(PackedModule):
    """A norm over channels that saves its normalized input in few bits, and the standard deviations.

    Output, running statistics and dβ are exact, dX and dγ unbiased. In eval mode in a model that trains, as where
    BatchNorm is frozen, the running statistics are given: dX is exact, and of the input nothing is saved but a code for
    dγ, if γ is trained. In a model in eval mode, of few elements (:func:`rmm_linear.packing.norms.few_elements`), and
    over several processes (``nn.SyncBatchNorm``), the module stays as it is.

    Memory: :func:`rmm_linear.ops.channel_norms.channel_bytes`, about bits/8 + 1/64 bytes per element.
    """

    rmm_operation = "norm"
    rmm_learns_rows = False  # statistics read all rows
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    running_mean: Tensor
    running_var: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Normalize an input of shape (N, C, …)."""
        if not is_dense(input) or not input.is_floating_point():
            return super().forward(input)
        weight, bias = self.weight, self.bias
        if not self.training:
            return self._fixed(input) if self._is_fixed(input) else super().forward(input)
        call = self._packed_call((), input.device)
        few = self._few_elements(input)
        self._note_call(few)
        is_trained = input.requires_grad or (weight is not None and weight.requires_grad)
        is_exact = (
            call.is_exact
            or few is not None
            or input.dim() < 2
            or not input.numel()
            or any(map(is_dtensor, (input, weight, bias)))
        )
        if is_exact or not (torch.is_grad_enabled() and is_trained):
            return super().forward(input)
        run: Callable[[Tensor], Any] = super().forward
        if isinstance(self, _BatchNorm) and not torch.compiler.is_compiling():
            run = functools.partial(_WITH_STATISTICS, self)
        elif isinstance(self, _InstanceNorm) and input.dim() == self._get_no_batch_dim():
            alone = functools.partial(_on_first, run)
            return self._coded(input.unsqueeze(0), alone, call).squeeze(0)
        return self._survey(input, self._coded(input, run, call))

    def _few_elements(self, input: Tensor) -> str | None:
        """Say why a call stays exact whose statistics are those of few elements; None if it does not."""
        alone = isinstance(self, _InstanceNorm) and input.dim() == self._get_no_batch_dim()
        if input.dim() < 2 or not input.numel():
            return None
        shape = (1, *input.shape) if alone else input.shape
        count = sets_of((shape[0], 1, shape[1], math.prod(shape[2:])), self._groups(shape[1]))[1]
        return few_elements(count, self.rmm_config.norm_bits)

    def _is_fixed(self: Any, input: Tensor) -> bool:
        """Say whether a norm in eval mode is one of a model that trains, by running statistics."""
        context = self.rmm_context
        if context is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return False
        outermost, weight = context.outermost, self.weight
        is_trained = input.requires_grad or (weight is not None and weight.requires_grad)
        has_statistics = getattr(self, "running_mean", None) is not None and self.running_var is not None
        is_plain = has_statistics and input.dim() > 1 and not any(map(is_dtensor, (input, weight)))
        return is_plain and is_trained and input.numel() > 0 and outermost is not None and outermost.training

    def _fixed(self, input: Tensor) -> Tensor:
        """Normalize by running statistics, as an affine map of every channel."""
        call = self._packed_call((), input.device)
        run: Callable[[Tensor], Tensor] = super().forward
        alone = isinstance(self, _InstanceNorm) and input.dim() == self._get_no_batch_dim()
        if call.is_exact or alone:
            return run(input)
        bits, rstd = self.rmm_config.norm_bits, torch.rsqrt(self.running_var + self.eps)
        return FixedNormFunction.run(input, self.weight, self.bias, self.running_mean, rstd, run, bits, call)

    def _coded(self, input: Tensor, run: Callable[..., Tensor], call: SavingCall) -> Tensor:
        groups, bits = self._groups(input.shape[1]), self.rmm_config.norm_bits
        return normalized_channels(input, self.weight, self.bias, run, groups, self.eps, bits, call)

    def _groups(self: Any, channels: int) -> int:
        """Return the groups of the channels of a sample; 0 where samples are normalized together."""
        if isinstance(self, _BatchNorm):
            return 0
        return channels if isinstance(self, _InstanceNorm) else self.num_groups


def normalized_channels(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, run: Callable[..., Tensor], groups: int, eps: float,
    bits: int, call: SavingCall,
) -> Tensor:  # fmt: skip
    """Apply a norm over channels by ``run``, and save its normalized input in few bits."""
    # A few channels side by side would be a group of a code, with a scale of its own.
    is_rearranged = False
    if is_last := is_channels_last(input):
        is_rearranged = input.shape[1] < _FEW_CHANNELS
        is_last = not is_rearranged
    norm, stored = _ChannelNorm(groups, eps, bits, is_last, is_rearranged, call), None
    if torch.compiler.is_compiling():  # buffers change outside of the function
        with torch.no_grad():
            output = run(input)
            with autocast_off(input.device.type):
                stored = pack_channels(_arranged(input, is_last), None, bits, eps, groups)
        run = functools.partial(as_new, output)
    return ChannelNormFunction.run(input, weight, bias, stored, run, norm)


class ChannelNormFunction(SavingFunction):
    """A norm over channels with the gradients of a packed copy of its normalized input."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        stored: Tensor | None,
        run: Callable[..., Tensor],
        norm: _ChannelNorm,
    ) -> Tensor:
        """Apply the norm; without a packed copy, make it."""
        ctx.norm, ctx.call, ctx.input_dtype = norm, norm.call, input.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        output = run(input) if stored is None else run()  # first: it says what shapes it refuses
        output, *statistics = output if isinstance(output, tuple) else (output,)
        if stored is None:
            with autocast_off(input.device.type):
                how = norm.call.seed, norm.bits, norm.eps, norm.groups
                stored = pack_channels(_arranged(input, norm.is_last), *how, *statistics)
        ctx.save_for_backward(weight, stored)
        return as_no_view(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients."""
        (grad_output,), (weight, stored) = grad_outputs, ctx.saved_tensors
        norm: _ChannelNorm = ctx.norm
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        y = _arranged(grad_output, norm.is_last)
        SavingFunction.received(ctx, grad_output[:0], "a packed norm")
        how = norm.bits, norm.groups, ctx.input_dtype, needs_weight or needs_bias
        with autocast_off(y.device.type):
            x, of_weight, of_bias = channel_backward(y, stored, None if weight is None else weight.detach(), *how)
        grad_weight = of_weight.to(weight.dtype) if needs_weight and weight is not None else None
        grad_bias = of_bias.to(ctx.bias_dtype) if needs_bias else None
        grad_input = _as_before(x, grad_output.shape, norm.is_last)
        if norm.is_rearranged:
            grad_input = grad_input.contiguous(memory_format=LAST[grad_input.dim()])
        return grad_input, grad_weight, grad_bias, None, None, None


class FixedNormFunction(SavingFunction):
    """A norm by statistics that are given: dX and dβ are exact, dγ = Σ dY ∘ ĥ is made of codes of h."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        rstd: Tensor,
        run: Callable[[Tensor], Tensor],
        bits: int,
        call: SavingCall,
    ) -> Tensor:
        """Apply the norm; nothing of the input is saved where γ is not trained."""
        ctx.call, ctx.bits, ctx.layout = call, bits, MemoryLayout.of(input)
        ctx.dtypes = input.dtype, None if bias is None else bias.dtype
        output, stored = run(input), None
        if ctx.needs_input_grad[1]:
            with autocast_off(input.device.type):
                h = (input - _of_channels(mean, input)) * _of_channels(rstd, input)
                stored = encode_matrix(ctx.layout.matrix(h), bits, draw_seed() if call.seed is None else call.seed)
        ctx.save_for_backward(weight, rstd, stored)
        return as_no_view(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients."""
        (y,), (weight, rstd, stored) = grad_outputs, ctx.saved_tensors
        SavingFunction.received(ctx, y[:0].reshape(0, 1), "a packed norm")
        of_input = of_weight = of_bias = None
        others, wide = [dim for dim in range(y.dim()) if dim != 1], torch.promote_types(y.dtype, torch.float32)
        with autocast_off(y.device.type):
            if ctx.needs_input_grad[0]:
                of_input = (y * _of_channels(rstd if weight is None else rstd * weight, y)).to(ctx.dtypes[0])
            if stored is not None and weight is not None:
                layout: MemoryLayout = ctx.layout
                h = layout.tensor(decode_matrix(stored, layout.rows, layout.columns, ctx.bits, wide))
                of_weight = (y * h).sum(others).to(weight.dtype)
            if ctx.needs_input_grad[2]:
                of_bias = y.sum(others, dtype=wide).to(ctx.dtypes[1])
        return of_input, of_weight, of_bias, None, None, None, None, None


def _of_channels(numbers: Tensor, x: Tensor) -> Tensor:
    """Return a number for each channel so that they are broadcast to (N, C, …)."""
    return numbers.view(-1, *(1,) * (x.dim() - 2))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Return what F.batch_norm does, by the function that it calls, and mean and 1/σ of every channel."""
    if eps <= 0:  # which it refuses, or takes in evaluation alone
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    F._verify_batch_size(list(input.size()))  # pyright: ignore[reportAttributeAccessIssue]
    how = weight, bias, running_mean, running_var, training, momentum, eps, torch.backends.cudnn.enabled
    output, mean, rstd, *_ = torch._batch_norm_impl_index(input, *how)  # pyright: ignore[reportPrivateImportUsage]
    return (output, mean, rstd) if mean.dtype == torch.float32 else output


# The forward pass of BatchNorm, whose statistics are not computed again.
_WITH_STATISTICS = FunctionType(
    _BatchNorm.forward.__code__, {**_BatchNorm.forward.__globals__, "F": SimpleNamespace(batch_norm=_batch_norm)}
)


def _on_first(run: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """Run a module on the one sample of a batch."""
    return run(batch.squeeze(0)).unsqueeze(0)


def _arranged(x: Tensor, is_last: bool) -> Tensor:
    """Return (N, C, …) as (N, S, C, B), contiguous: (N, L, C, 1) or (N, 1, C, L)."""
    samples, channels = x.shape[:2]
    if is_last:
        return x.movedim(1, -1).reshape(samples, -1, channels, 1).contiguous()
    return x.reshape(samples, 1, channels, -1).contiguous()


def _as_before(x: Tensor, shape: torch.Size, is_last: bool) -> Tensor:
    """Undo :func:`_arranged`."""
    if not is_last:
        return as_shape(x, shape)
    return permuted(as_shape(x, (shape[0], *shape[2:], shape[1])), (0, len(shape) - 1, *range(1, len(shape) - 1)))


def is_channel_norm(module: nn.Module) -> bool:
    """Say whether a module is one of PyTorch's norms over channels, or a subclass that computes the same.

    Example:
        >>> is_channel_norm(nn.BatchNorm2d(8)), is_channel_norm(nn.SyncBatchNorm(8)), is_channel_norm(nn.LayerNorm(8))
        (True, False, False)
    """
    if not isinstance(module, (_BatchNorm, _InstanceNorm, nn.GroupNorm)) or type(module).forward not in _FORWARDS:
        return False
    return not any(is_lazy(one) for one in (*module.parameters(), *module.buffers()))
