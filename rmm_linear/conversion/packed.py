"""Choose the modules that save a packed stand-in: activations, norms, attention and dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from rmm_linear.activations.base import packed_class
from rmm_linear.activations.dropout import PackedDropout, is_dropout
from rmm_linear.config import RMMConfig
from rmm_linear.context.model_context import ModelContext
from rmm_linear.conversion.linears import replaced_reason
from rmm_linear.conversion.names import matches


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
    chosen: dict[str, PackedChoice] = {}
    skipped: dict[str, str] = {}
    for module, name in names.items():
        found = _choice(module, config.for_module(name))
        if found is None or found.operation not in config.operations:
            continue
        excluded = config.exclude_modules is not None and matches(config.exclude_modules, name)
        reason = "in exclude_modules" if excluded else replaced_reason(module)
        if reason is None:
            chosen[name] = found
        else:
            skipped[name] = reason
    return chosen, skipped


def _choice(module: nn.Module, config: RMMConfig) -> PackedChoice | None:
    """What a module of its own class saves; None for other modules."""
    if is_dropout(module):
        return PackedChoice("dropout", module, "1 bit per element", _change_class(module, PackedDropout))
    return None


def _change_class(module: Any, packed: type[Any]) -> Callable[[RMMConfig, ModelContext, int], None]:
    def set_up(config: RMMConfig, context: ModelContext, index: int) -> None:
        module.__class__ = packed_class(packed, type(module))
        module._set_up(config, context, index)

    return set_up
