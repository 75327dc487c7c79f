"""Say which modules keep their own output where ``fused=True`` asks for a kernel that makes it, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from rmm_linear._support.tables import pattern_of
from rmm_linear.activations.gated_parts import GatedParts
from rmm_linear.activations.norm_casts import casts_of
from rmm_linear.activations.norm_form import NormForm
from rmm_linear.activations.pointwise import is_composed
from rmm_linear.backends.select import backend_of
from rmm_linear.config import RMMConfig

if TYPE_CHECKING:
    from rmm_linear.conversion.packed import PackedChoice

Places = set[tuple[str, torch.dtype]]  # types of devices, and dtypes

NOWHERE = (
    "fused=True has no effect on {}, where Triton's kernels do not run: activations, norms and gated MLPs compute "
    "their outputs themselves there, as without it."
)
_SOME = "fused=True has no effect on {}{}."  # names, and one of the following
_NO_KERNELS = ": on {}, Triton's kernels do not run"
_IN_PLACE = ": modules that work in place stay as they are"
_UNKNOWN = ": how they round is not known"
_AUTOCAST = " under autocast, which chooses a dtype for each function"


def why_unfused(model: nn.Module, choices: Mapping[str, PackedChoice], config: RMMConfig) -> str | None:
    """Say where ``fused=True`` has no effect on a model, and why.

    Args:
        model: The model, not converted yet.
        choices: Name to what of it is to save a packed stand-in.
        config: The configuration.

    Returns:
        A line for every reason; None where kernels make all outputs that they are asked for, or nothing asks for any.
    """
    everywhere, found = _places(model), dict[str, list[str]]()
    asked = {name: one for name, one in choices.items() if one.operation in ("activation", "norm")}
    asked = {name: one for name, one in asked.items() if config.for_module(name).fused}
    without = {name: place for name, one in asked.items() if (place := _no_kernels(one.module, everywhere)) is not None}
    if asked and len(without) == len(asked):
        return NOWHERE.format(_named(everywhere))
    for name, choice in asked.items():
        reason = _NO_KERNELS.format(without[name]) if name in without else _reason(choice)
        if reason is not None:
            found.setdefault(reason, []).append(name)
    return "\n".join(_SOME.format(_siblings(names), reason) for reason, names in found.items()) or None


def _reason(choice: PackedChoice) -> str | None:
    """Why the module's own output stays, always or under autocast, where kernels run."""
    module, computes = choice.module, choice.computes
    if isinstance(computes, NormForm):
        return _AUTOCAST if casts_of(module, computes) else _UNKNOWN
    if isinstance(computes, GatedParts):
        module = module.get_submodule(computes.act)
    elif getattr(module, "inplace", False):
        return _IN_PLACE
    return _AUTOCAST if is_composed(module) else None


def _no_kernels(module: nn.Module, everywhere: Places) -> str | None:
    """Where the module is, if no kernels run there: of one without parameters, where the model is."""
    places = _places(module) or everywhere
    has_kernels = not places or any(backend_of(device, dtype) == "triton" for device, dtype in places)
    return None if has_kernels else _named(places)


def _places(module: nn.Module) -> Places:
    return {(parameter.device.type, parameter.dtype) for parameter in module.parameters()}


def _named(places: Places) -> str:
    return " and ".join(sorted(f"{device} ({str(dtype).removeprefix('torch.')})" for device, dtype in places))


def _siblings(names: list[str]) -> str:
    """The names, of numbered siblings what they have in common."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(pattern_of(name), []).append(name)
    return ", ".join((same[0] if len(same) == 1 else pattern) or "the model" for pattern, same in groups.items())
