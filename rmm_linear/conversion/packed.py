"""Choose the modules that save a packed stand-in: activations, norms, attention and dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from rmm_linear.activations.base import PackedModule, packed_class
from rmm_linear.activations.dropout import PackedDropout, is_dropout
from rmm_linear.activations.norm import PackedNorm
from rmm_linear.activations.norm_form import norm_of
from rmm_linear.activations.pointwise import PackedActivation, pointwise_function
from rmm_linear.config import RMMConfig
from rmm_linear.context.model_context import ModelContext
from rmm_linear.conversion.linears import replaced_reason
from rmm_linear.conversion.names import matches
from rmm_linear.conversion.widths import choose_widths


@dataclass(frozen=True)
class PackedChoice:
    """A module that is to save a packed stand-in.

    Attributes:
        operation: One of :data:`rmm_linear.config.OPERATIONS`.
        module: The module.
        saved: What it will save, in words.
        set_up: Changes the module, given its configuration, the model's context and its index there.
    """

    operation: str
    module: nn.Module
    saved: str
    set_up: Callable[[RMMConfig, ModelContext, int], None]


def choose_packed(names: dict[nn.Module, str], config: RMMConfig) -> tuple[dict[str, PackedChoice], dict[str, str]]:
    """Choose the modules that a configuration makes save a packed stand-in.

    Args:
        names: Every submodule of the model to its name.
        config: The configuration.

    Returns:
        Name to choice; and name to reason for modules that would be chosen if they could be changed.
    """
    found: dict[str, PackedChoice] = {}
    skipped: dict[str, str] = {}
    widths = choose_widths([name for module, name in names.items() if is_activation(module)], config)
    for module, name in names.items():
        choice = _choice(module, config.for_module(name), widths.get(name, 0))
        if choice is None or choice.operation not in config.operations:
            continue
        excluded = config.exclude_modules is not None and matches(config.exclude_modules, name)
        reason = "in exclude_modules" if excluded else replaced_reason(module)
        if reason is None:
            found[name] = choice
        else:
            skipped[name] = reason
    return found, skipped


def is_activation(module: nn.Module) -> bool:
    """Say whether a module is a pointwise activation that can save its derivative in few bits.

    Args:
        module: The module.

    Returns:
        True if it is.
    """
    return pointwise_function(module) is not None


def _choice(module: Any, config: RMMConfig, activation_bits: int) -> PackedChoice | None:
    """What a module saves; None for one that saves nothing that could be packed."""
    if is_dropout(module):
        return PackedChoice("dropout", module, "1 bit per element", _change_class(module, PackedDropout))
    function = pointwise_function(module)
    if function is not None:
        bits = function.bits(activation_bits)
        saved = f"its derivative, {bits} bit{'s' if bits > 1 else ''}{', exact' if function.is_exact else ''}"
        return PackedChoice("activation", module, saved, _change_class(module, PackedActivation, rmm_bits=bits))
    if norm_of(module) is not None:
        return PackedChoice("norm", module, f"its rows, {config.norm_bits} bits", _change_class(module, PackedNorm))
    return None


def _change_class(
    module: Any, packed: type[PackedModule], **attributes: Any
) -> Callable[[RMMConfig, ModelContext, int], None]:
    def set_up(config: RMMConfig, context: ModelContext, index: int) -> None:
        module.__class__ = packed_class(packed, type(module))
        module._set_up(config, context, index)
        for name, value in attributes.items():
            setattr(module, name, value)

    return set_up
