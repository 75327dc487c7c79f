"""Choose the modules that save less than they do: activations, norms, attention, dropout and output layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from rmm_linear.activations.attention import PackedAttentionCaller, calls_attention
from rmm_linear.activations.attention_interface import PackedAttention, is_attention, stays_exact
from rmm_linear.activations.base import PackedModule, packed_class
from rmm_linear.activations.dropout import PackedDropout, is_dropout
from rmm_linear.activations.gated import PackedGatedMLP, activation_bits
from rmm_linear.activations.gated_parts import GatedParts, gated_parts, lacks_weights
from rmm_linear.activations.logits import ChunkedHead
from rmm_linear.activations.norm import PackedNorm
from rmm_linear.activations.norm_form import NormForm, norm_of
from rmm_linear.activations.pointwise import PackedActivation, pointwise_function
from rmm_linear.config import RMMConfig
from rmm_linear.context.model_context import ModelContext
from rmm_linear.conversion.linears import replaced_reason
from rmm_linear.conversion.names import matches
from rmm_linear.conversion.widths import choose_widths
from rmm_linear.packing.pointwise import Pointwise

_UNTRIED = "perhaps a gated MLP, which cannot be tried on the meta device: convert after its weights are there"


@dataclass(frozen=True)
class PackedChoice:
    """A module that is to save a packed stand-in.

    Attributes:
        operation: One of :data:`rmm_linear.config.OPERATIONS`.
        module: The module.
        saved: What it will save, in words.
        set_up: Changes the module, given its configuration, the model's context and its index there.
        computes: What was found of a norm or of a gated MLP; None for all others.
    """

    operation: str
    module: nn.Module
    saved: str
    set_up: Callable[[RMMConfig, ModelContext, int], None]
    computes: NormForm | GatedParts | None = None


def choose_packed(names: dict[nn.Module, str], config: RMMConfig) -> tuple[dict[str, PackedChoice], dict[str, str]]:
    """Choose the modules that a configuration makes save a packed stand-in.

    Modules are tried on a few numbers, of the selected operations alone.

    Args:
        names: Every submodule of the model to its name.
        config: The configuration.

    Returns:
        Name to choice; and name to reason for modules that would be chosen if they could be changed.
    """
    found: dict[str, PackedChoice] = {}
    skipped: dict[str, str] = {}
    choices = _choices(names, config)
    for module, name in names.items():
        choice = choices.get(module)
        if choice is None:
            if "activation" in config.operations and lacks_weights(module):
                skipped[name] = _skip_reason(module, name, config) or _UNTRIED
            continue
        reason = _skip_reason(module, name, config)
        if reason is None and choice.operation == "attention" and is_attention(module):
            reason = stays_exact(module)
        if reason is None:
            found[name] = choice
        else:
            skipped[name] = reason
    return found, skipped


def _skip_reason(module: nn.Module, name: str, config: RMMConfig) -> str | None:
    excluded = config.exclude_modules is not None and matches(config.exclude_modules, name)
    return "in exclude_modules" if excluded else replaced_reason(module)


def _choices(names: dict[nn.Module, str], config: RMMConfig) -> dict[nn.Module, PackedChoice]:
    """Module to what it saves, for those of the selected operations that save something that can be packed."""
    found = {module: _choice(module, config.for_module(name), config.operations) for module, name in names.items()}
    chosen = {module: choice for module, choice in found.items() if choice is not None}
    if "activation" not in config.operations:
        return chosen
    gated = {module: parts for module in names if (parts := gated_parts(module)) is not None}
    # The activation of a gated MLP saves nothing of its own, unless it or the MLP is to stay as it is.
    inside: set[nn.Module] = set()
    for module, parts in gated.items():
        act = module.get_submodule(parts.act)
        if _skip_reason(act, f"{names[module]}.{parts.act}", config) is None:
            chosen[module] = _gated(module, config.for_module(names[module]), parts)
            if _skip_reason(module, names[module], config) is None:
                inside.add(act)
    functions = {module: pointwise_function(module) for module in names if module not in inside}
    activations = {names[module]: (module, function) for module, function in functions.items() if function is not None}
    for name, bits in choose_widths(list(activations), config).items():
        module, function = activations[name]
        chosen[module] = _pointwise(module, function, function.bits(bits))
    return chosen


def _choice(module: Any, config: RMMConfig, operations: Sequence[str]) -> PackedChoice | None:
    if "dropout" in operations and is_dropout(module):
        return PackedChoice("dropout", module, "1 bit per element", _change_class(module, PackedDropout))
    if "norm" in operations and (form := norm_of(module)) is not None:
        set_up = _change_class(module, PackedNorm, form=form)
        return PackedChoice("norm", module, f"its rows, {config.norm_bits} bits", set_up, form)
    if "attention" in operations and (is_attention(module) or calls_attention(module)):
        kind = PackedAttention if is_attention(module) else PackedAttentionCaller
        saved = f"queries, keys and values, {config.attention_bits} bits"
        return PackedChoice("attention", module, saved, _change_class(module, kind))
    return None


def _gated(module: Any, config: RMMConfig, parts: GatedParts) -> PackedChoice:
    saved = f"two products of the gate, {activation_bits(config)} bits"
    return PackedChoice("activation", module, saved, _change_class(module, PackedGatedMLP, parts=parts), parts)


def _pointwise(module: Any, function: Pointwise, bits: int) -> PackedChoice:
    saved = f"its derivative, {bits} bit{'s' if bits > 1 else ''}{', exact' if function.is_exact else ''}"
    return PackedChoice("activation", module, saved, _change_class(module, PackedActivation, bits=bits))


def chunked_head(module: nn.Module) -> PackedChoice:
    """Make the choice for an output layer whose logits are not to be saved.

    Args:
        module: The layer.

    Returns:
        The choice.
    """
    saved = "no logits: the loss is computed in chunks"
    return PackedChoice("logits", module, saved, _change_class(module, ChunkedHead))


def _change_class(
    module: Any, packed: type[PackedModule], **options: Any
) -> Callable[[RMMConfig, ModelContext, int], None]:
    def set_up(config: RMMConfig, context: ModelContext, index: int) -> None:
        module.__class__ = packed_class(packed, type(module))
        module._set_up(config, context, index, **options)

    return set_up
