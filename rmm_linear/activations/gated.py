"""Gated MLPs that save two packed products instead of the gate's output, the activation's and the other layer's."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from rmm_linear._support.layouts import as_shape, is_dense
from rmm_linear.activations.base import PackedModule, SavingCall, changes_setting, is_setting
from rmm_linear.activations.gated_parts import GatedParts, activation_kind, gated_parts
from rmm_linear.activations.pointwise import is_composed, square_of_sums
from rmm_linear.config import RMMConfig
from rmm_linear.context.model_context import ModelContext
from rmm_linear.layers.function import SavingFunction
from rmm_linear.ops.dispatch import runs_fused
from rmm_linear.ops.gated import apply_gated, gate_and_pack, gated_scales, keep_gated
from rmm_linear.packing import weighted_variance
from rmm_linear.packing.gated import ACTIVATIONS

logger = logging.getLogger(__name__)


class PackedGatedMLP(PackedModule):
    """A gated MLP, down(act(a) · b) with a = gate(x) and b = up(x), that saves b · act'(a) and act(a), packed.

    The output is exact, but for its last bits where ``RMMConfig.fused`` lets a kernel make it. The gradients with
    respect to a and b are random and unbiased, since each is linear in one of the two products: see
    :mod:`rmm_linear.packing.gated`. The linear layers are called as they are, so they may be sketched or wrapped; the
    layer after the product reads the exact one. What the activation computes is found when the module is set up, and
    when the activation or one of its attributes is another.

    Memory: 2 · (⌈C · bits / 8⌉ + ⌈C / 64⌉) bytes for a row of C elements, where the module saves 3 C elements.
    """

    rmm_operation = "activation"
    rmm_parts: GatedParts
    rmm_is_composed: bool
    rmm_act: tuple[type[nn.Module], tuple[tuple[str, object], ...]]
    rmm_settings: dict[str, object]  # of the module itself, as it was when its parts were found
    rmm_is_other: bool = False  # whether some have other values now

    def _set_up(
        self,
        config: RMMConfig | None,
        context: ModelContext | None = None,
        index: int = 0,
        parts: GatedParts | None = None,
    ) -> None:
        super()._set_up(config, context, index)
        found = parts or gated_parts(self)
        if found is None:
            raise ValueError(f"{type(self).__name__} is no gated MLP: gated_parts finds no parts in it.")
        self._note_act(found.act_of(self), found)
        self.rmm_settings = {name: one for name, one in vars(self).items() if is_setting(name, one)}
        self.rmm_is_other = False

    def _note_act(self, act: nn.Module, parts: GatedParts) -> None:
        self.rmm_parts, self.rmm_is_composed = parts, is_composed(act)
        seen = ((name, value) for name, value in vars(act).items() if isinstance(value, int | float | str))
        self.rmm_act = type(act), tuple(one for one in seen if one[0] != "training")

    def _follow(self, act: nn.Module) -> None:
        """Find what the activation computes, if it or one of its attributes is another."""
        kind, seen = self.rmm_act
        if type(act) is kind and all(getattr(act, name, None) == value for name, value in seen):
            return
        activation = None if torch.compiler.is_compiling() else activation_kind(act)
        if activation is None:
            raise RuntimeError(
                f"The activation of a converted gated MLP must stay one of {', '.join(ACTIVATIONS)}, got {act!r}. "
                "Call rmm_linear.revert(model), change it and convert the model again."
            )
        self._note_act(act, dataclasses.replace(self.rmm_parts, activation=activation))

    def __setattr__(self, name: str, value: Any) -> None:
        """Run the module's own code where a setting has another value than when its parts were found."""
        is_changed = "rmm_settings" in vars(self) and changes_setting(self, name, value)
        before = getattr(self, name, None)
        super().__setattr__(name, value)
        if is_changed:
            self.rmm_settings.setdefault(name, before)
            is_other = any(getattr(self, one, None) != known for one, known in self.rmm_settings.items())
            if is_other and not self.rmm_is_other:
                logger.warning("A gated MLP runs exactly: its %s is %r now, and was %r.", name, value, before)
            self.rmm_is_other = is_other

    def exact_forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Apply the MLP to its input, shape (*, H)."""
        values = (*args, *kwargs.values())
        if not self.training or len(values) != 1 or not is_dense(values[0]):
            return self.exact_forward(*args, **kwargs)
        (x,) = values
        call = self._packed_call(tuple(x.shape[:-1]), x.device)
        if call.is_exact or self.rmm_is_other or not torch.is_grad_enabled():
            return self.exact_forward(*args, **kwargs)
        a, b = self.rmm_parts.gate_and_up(self, x)
        act = self.rmm_parts.act_of(self)
        is_saving = (a.requires_grad or b.requires_grad) and a.numel() > 0
        if is_saving and a.dtype == b.dtype and a.shape == b.shape and _is_plain(act, a):
            self._follow(act)
            bits = int(self._width(gated_bits(self.rmm_config)))
            run = None if self._is_fused(act, a) else act
            product = GatedFunction.run(a, b, run, self.rmm_parts.activation, bits, call)
        else:
            product = act(a) * b
        return self.rmm_parts.output(self, product)

    def _is_fused(self, act: nn.Module, a: Tensor) -> bool:
        """Say whether a kernel makes the product, which calls the activation no more."""
        if not self.rmm_config.fused or act._forward_hooks or act._forward_pre_hooks:
            return False
        return runs_fused(a, self.rmm_is_composed)


class GatedFunction(SavingFunction):
    """act(a) · b, with both of its derivatives packed."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, act: nn.Module | None, activation: str, bits: int, call: SavingCall
    ) -> Tensor:
        """Compute the product: by ``act``, or if it is None, in the pass that packs."""
        ctx.call, ctx.bits, ctx.dtype, index = call, bits, a.dtype, call.index
        rows = (matrix.reshape(-1, matrix.shape[-1]) for matrix in (a, b))
        how = activation, bits, call.seed, index, *ctx.needs_input_grad[:2]
        if act is None:
            product, stored = gate_and_pack(*rows, *how)
            ctx.save_for_backward(stored, index)
            return product.view(a.shape)
        # Before the activation, which may write into its input.
        ctx.save_for_backward(keep_gated(*rows, *how), index)
        return act(a) * b

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        y = SavingFunction.received(ctx, grad_output, "a packed gated MLP")
        stored, index = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        found = apply_gated(y, stored, ctx.bits, index, *needs)
        if ctx.call.noise is not None:
            made = [one for one in found if one is not None]
            scales = gated_scales(stored, len(y) if index is None else len(index), y.shape[1], ctx.bits, *needs)
            for place, (gradient, each) in enumerate(zip(made, scales, strict=True)):
                ctx.call.noise(weighted_variance(each, y, index), square_of_sums(gradient), ctx.bits, place)
        gradients = (None if one is None else as_shape(one, grad_output.shape).to(ctx.dtype) for one in found)
        return *gradients, None, None, None, None


def _is_plain(act: nn.Module, a: Tensor) -> bool:
    """Say whether hooks of the activation leave its output and its gradient as they are."""
    if act._backward_hooks or act._backward_pre_hooks:
        return False
    if torch.compiler.is_compiling() or not (act._forward_hooks or act._forward_pre_hooks):
        return True
    if isinstance(a, FakeTensor):  # simulated: the hooks follow the modules, and there are no values to compare
        return True
    with torch.no_grad():
        return torch.equal(act(a.detach().clone()), act.forward(a.detach().clone()))


def gated_bits(config: RMMConfig) -> int:
    """Return the width in which a gated MLP packs its products: 8, 4 or 2, with 2 for 1."""
    return max(2, config.activation_bits)
