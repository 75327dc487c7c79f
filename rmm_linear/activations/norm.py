"""LayerNorm and RMSNorm that save a packed copy of the normalized rows: unbiased gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.stateless import _reparametrize_module

from rmm_linear._support.autocast import autocast_off
from rmm_linear._support.distributed import is_dtensor
from rmm_linear._support.layouts import as_shape, is_dense
from rmm_linear.activations.base import PackedModule, SavingCall, changes_setting
from rmm_linear.activations.norm_form import EPS, Casts, Dtypes, NormForm, casts_of, norm_of
from rmm_linear.config import RMMConfig
from rmm_linear.context.model_context import ModelContext
from rmm_linear.context.sketch_cache import CacheEntry
from rmm_linear.layers.function import SavingFunction
from rmm_linear.layers.sharded import rows_layout, say_exact, sharded_rows
from rmm_linear.ops.dispatch import runs_fused
from rmm_linear.ops.norms import norm_backward, normalize_and_pack, pack_norm
from rmm_linear.packing.norms import few_elements


class _Norm(NamedTuple):
    """The arguments of a call that are not tensors."""

    form: NormForm
    bits: int
    call: SavingCall


class PackedNorm(PackedModule):
    """A norm that saves its normalized rows in few bits. The output and dβ are exact, dX and dγ unbiased.

    Where ``RMMConfig.fused`` is set, Triton's kernels run and autocast is off, the output is made in the pass that
    packs, and differs from the module's own in its last bits: it is rounded to the same dtypes in the same order.

    Memory: :func:`rmm_linear.ops.norms.norm_bytes`, about bits/8 + 1/16 bytes per element, where ``nn.LayerNorm`` saves
    its input, and RMSNorm classes in half types several float32 copies of it.
    """

    rmm_operation = "norm"
    weight: Tensor | None
    bias: Tensor | None
    # What the module computes, found when it is set up and when its eps changes; None where it stays exact
    rmm_norm: NormForm | None
    rmm_casts: dict[Dtypes, Casts]  # how it rounds, found when that is; empty if its output is its own

    def _set_up(
        self,
        config: RMMConfig | None,
        context: ModelContext | None = None,
        index: int = 0,
        form: NormForm | None = None,
    ) -> None:
        super()._set_up(config, context, index)
        self._compute(form or norm_of(self))

    def _compute(self, form: NormForm | None) -> None:
        self.rmm_norm = form
        self.rmm_casts = casts_of(self, form) if form is not None and self.rmm_config.fused else {}

    def __setattr__(self, name: str, value: Any) -> None:
        """Follow a change of eps, or of another setting."""
        is_changed = "rmm_norm" in vars(self) and changes_setting(self, name, value)
        super().__setattr__(name, value)
        if name in EPS or is_changed:
            self._compute(norm_of(self))

    def forward(self, *args: Any, **named: Any) -> Tensor:
        """Normalize an input of shape (*, H)."""
        form, values = self.rmm_norm, (*args, *named.values())
        if not self.training or form is None or len(values) != 1 or not _has_rows(values[0], form.dims):
            return super().forward(*args, **named)
        (input,) = values
        if is_dtensor(input):
            return self._sharded(input, form.dims)
        call = self._packed_call(tuple(input.shape[: input.dim() - form.dims]), input.device)
        few = few_elements(input.shape[input.dim() - form.dims :].numel(), self.rmm_config.norm_bits)
        if few is not None:
            self._note_call(few)
            return super().forward(input)
        weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
        is_trained = input.requires_grad or (weight is not None and weight.requires_grad)
        if call.is_exact or not (torch.is_grad_enabled() and is_trained) or any(map(is_dtensor, (input, weight, bias))):
            return super().forward(input)
        norm = _Norm(form, self.rmm_config.norm_bits, call)
        entry, casts = self._entry(input, norm), self._known_casts(input, weight, bias)
        stored = None if entry is None or entry.saved is None else entry.saved[0]
        run: Callable[[Tensor], Any] = super().forward
        if stored is None and casts is not None:
            run = functools.partial(self._normalize, norm, casts, entry)
        elif stored is None and call.seed is not None:
            run = functools.partial(self._pack, norm, entry, run)
        elif stored is None:  # in compiled code
            with torch.no_grad(), autocast_off(input.device.type):
                stored = pack_norm(input, None, None, norm.bits, form.eps_of(input.dtype), *form.layout)
        output = NormFunction.run(input, weight, bias, stored, call.index, run, norm)
        return self._survey(input, output, super().forward, form.dims)

    def _sharded(self, input: Tensor, dims: int) -> Tensor:
        """Normalize the rows that this rank has of a tensor parallel model; exactly in compiled code."""
        own = {name: one for name, one in self._parameters.items() if one is not None}
        is_exact = torch.compiler.is_compiling() and say_exact()
        layout = None if is_exact else rows_layout(input, list(own.values()), dims)
        if layout is None:
            return super().forward(input)
        if self.rmm_context is not None:
            self.rmm_context.ranks.note(self.rmm_index, input.device_mesh, layout[0])  # pyright: ignore

        def run(rows: Tensor, parts: list[Tensor]) -> Tensor:
            with _reparametrize_module(self, dict(zip(own, parts, strict=True))):
                return PackedNorm.forward(self, rows)

        return sharded_rows(run, input, list(own.values()), layout)

    def _pack(
        self, norm: _Norm, entry: CacheEntry | None, exact: Callable[[Tensor], Any], input: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the module's own output and the packed copy, made inside of the autograd function."""
        form, call = norm.form, norm.call
        with autocast_off(input.device.type):
            stored = pack_norm(input, call.index, call.seed, norm.bits, form.eps_of(input.dtype), *form.layout)
        if entry is not None:
            entry.saved = (stored,)
        return exact(input), stored

    def _normalize(self, norm: _Norm, casts: Casts, entry: CacheEntry | None, input: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and the packed copy, made in one pass inside of the autograd function."""
        form, bias = norm.form, getattr(self, "bias", None)
        output, stored = normalize_and_pack(
            input, form.gamma(getattr(self, "weight", None)), None if bias is None else bias.detach().reshape(-1),
            norm.call.index, norm.call.seed, norm.bits, form.eps_of(input.dtype), form.centered, *casts, form.dims,
        )  # fmt: skip
        if entry is not None:
            entry.saved = (stored,)
        return output, stored

    def _known_casts(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Casts | None:
        """How the kernel that makes the output is to round; None if the module makes it."""
        if not self.rmm_casts:
            return None
        dtypes = {tensor.dtype for tensor in (weight, bias) if tensor is not None}
        if len(dtypes) > 1 or not runs_fused(input, is_composed=True):
            return None
        return self.rmm_casts.get((input.dtype, next(iter(dtypes), None)))

    def _entry(self, input: Tensor, norm: _Norm) -> CacheEntry | None:
        """Return the cache in which norms of the same input share its packed copy."""
        context = self.rmm_context
        if norm.call.seed is None or context is None or not context.is_open():
            return None
        if norm.call.on_backward is None and not context.sketch_cache.is_shared(self.rmm_index):  # on the short way
            return None
        key = "norm", norm.bits, norm.form.eps_of(input.dtype), *norm.form.layout, norm.call.mask
        return context.sketch_cache.entry(input, getattr(self, "weight", None), key, self.rmm_index)


def _has_rows(input: object, dims: int) -> bool:
    return isinstance(input, Tensor) and is_dense(input) and input.is_floating_point() and input.dim() >= dims


class NormFunction(SavingFunction):
    """A norm with the gradients of a packed copy of its normalized rows."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        stored: Tensor | None,
        index: Tensor | None,
        run: Callable[[Tensor], Any],
        norm: _Norm,
    ) -> Tensor:
        """Apply the norm; without a packed copy, ``run`` makes it too."""
        ctx.norm, ctx.call, ctx.input_shape, ctx.input_dtype = norm, norm.call, input.shape, input.dtype
        ctx.bias_like = None if bias is None else (bias.shape, bias.dtype)
        output, stored = run(input) if stored is None else (run(input), stored)
        ctx.save_for_backward(weight, stored, index)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,), (weight, stored, index) = grad_outputs, ctx.saved_tensors
        norm: _Norm = ctx.norm
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        shape = grad_output.shape[grad_output.dim() - norm.form.dims :]
        rows = grad_output.numel() // max(1, shape.numel())
        with autocast_off(grad_output.device.type):
            y = SavingFunction.received(ctx, grad_output, "a packed norm", (rows, shape.numel()))
            dtypes = {weight.dtype} if needs_weight else set()
            dtypes |= {ctx.bias_like[1]} if needs_bias else set()
            x, grad_weight, grad_bias = norm_backward(
                y, stored, norm.form.gamma(weight), index, norm.bits, norm.form.centered, ctx.input_dtype,
                bool(dtypes), next(iter(dtypes)) if len(dtypes) == 1 else None,
            )  # fmt: skip
        grad_weight = _like(grad_weight, weight.shape, weight.dtype) if needs_weight else None
        if needs_bias:
            grad_bias = _like(grad_bias, *ctx.bias_like)
        return as_shape(x, ctx.input_shape), grad_weight, grad_bias if needs_bias else None, None, None, None, None


def _like(gradient: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    gradient = gradient if gradient.shape == shape else gradient.view(shape)
    return gradient if gradient.dtype == dtype else gradient.to(dtype)
