"""Choose the modules that are to save less: all but linear layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rmm_linear._support.patterns import matches
from rmm_linear._support.tables import folded
from rmm_linear.activations.attention import PackedAttentionCaller, calls_attention
from rmm_linear.activations.attention_interface import PackedAttention, is_attention, stays_exact
from rmm_linear.activations.base import PackedModule
from rmm_linear.activations.calls import PackedCalls, calls_of, operation_of, why_left
from rmm_linear.activations.channel_norm import PackedChannelNorm, is_channel_norm
from rmm_linear.activations.convolution import PackedConvolution, is_convolution, why_own
from rmm_linear.activations.dropout import PackedDropout, is_dropout
from rmm_linear.activations.elementwise import PackedElementwise, elementwise_form
from rmm_linear.activations.experts import PackedExperts, experts_bits, is_experts, why_exact
from rmm_linear.activations.gated import PackedGatedMLP, gated_bits
from rmm_linear.activations.gated_parts import GatedParts, gated_parts, lacks_weights, width_of
from rmm_linear.activations.logits import ChunkedHead
from rmm_linear.activations.norm import PackedNorm
from rmm_linear.activations.norm_form import NormForm, casts_of, norm_of
from rmm_linear.activations.pointwise import PackedActivation, is_composed, pointwise_function
from rmm_linear.activations.pooling import PackedAveragePool, PackedPool, bits_of, is_average_pool, is_max_pool
from rmm_linear.activations.region import PackedRegion, reads_softmax
from rmm_linear.activations.softmax import PackedSoftmax, is_softmax
from rmm_linear.backends.select import backend_of
from rmm_linear.config import OPERATIONS, RMMConfig
from rmm_linear.context.model_context import ModelContext
from rmm_linear.conversion.linears import QUANTIZED, is_linear_like, is_quantized, replaced_reason
from rmm_linear.conversion.names import not_selected, output_heads
from rmm_linear.layers.converted import joined_class
from rmm_linear.packing.pointwise import Pointwise

_WITHIN = "inside of an attention that runs again in the backward pass, and saves nothing for it"
_SYNCHRONIZED = "its statistics are those of several processes"
_UNTRIED = "perhaps a gated MLP, which cannot be tried on the meta device: convert after its weights are there"


@dataclass(frozen=True)
class PackedChoice:
    """A module that is to save a compressed activation."""

    operation: str
    module: nn.Module
    saved: str  # words for what it will save
    # Changes the module, given its configuration, the model's context and its index there
    set_up: Callable[[RMMConfig, ModelContext, int], None]
    # The formula that was found of a norm or of a gated MLP; None for all others
    computes: NormForm | GatedParts | None = None
    is_region: bool = False  # whether the module's code between its linear layers saves nothing, and runs again
    is_called: bool = False  # whether it saves for calls in the module's own code


def choose_packed(names: dict[nn.Module, str], config: RMMConfig) -> tuple[dict[str, PackedChoice], dict[str, str]]:
    """Choose the modules that a configuration makes save packed, and say why others cannot be changed."""
    found: dict[str, PackedChoice] = {}
    skipped: dict[str, str] = {}
    choices = _choices(names, config)
    within = _within_regions(choices, names, config)
    for module, name in names.items():
        choice = choices.get(module)
        if choice is None and module in within and _choice(module, config, config.operations) is not None:
            skipped[name] = _WITHIN
            continue
        if choice is None:
            if "activation" in config.operations and lacks_weights(module):
                skipped[name] = _skip_reason(module, name, config) or _UNTRIED
            elif "norm" in config.operations and isinstance(module, nn.SyncBatchNorm):
                skipped[name] = _skip_reason(module, name, config) or _SYNCHRONIZED
            elif "linear" in config.operations and not is_linear_like(module) and (why := why_left(module)):
                skipped[name] = _skip_reason(module, name, config) or why
            continue
        reason = _skip_reason(module, name, config)
        if reason is None and choice.operation == "attention" and is_attention(module) and not choice.is_region:
            reason = stays_exact(module)
        if reason is None and choice.operation == "experts":
            reason = why_exact(module)
        if reason is None and choice.operation == "convolution":
            is_called = not is_convolution(module) or _convolves(module)
            own = None if is_called else why_own(module)
            reason = f"{type(module).__name__} {QUANTIZED}" if is_quantized(module) else own
        if reason is None and choice.operation == "linear":
            reason = not_selected(name, module, config, [])
        if reason is None:
            found[name] = choice
        else:
            skipped[name] = reason
    return found, skipped


def outside_experts(names: dict[nn.Module, str], config: RMMConfig) -> dict[nn.Module, str]:
    """Leave out the modules inside of experts that are to be converted: their code is the derivative of all."""
    if "experts" not in config.operations:
        return names
    experts = [one for one, name in names.items() if is_experts(one) and _skip_reason(one, name, config) is None]
    inside = {one for module in experts if why_exact(module) is None for one in module.modules() if one is not module}
    return {module: name for module, name in names.items() if module not in inside}


def _skip_reason(module: nn.Module, name: str, config: RMMConfig) -> str | None:
    excluded = config.exclude_modules is not None and matches(config.exclude_modules, name)
    return "in exclude_modules" if excluded else replaced_reason(module)


def _choices(names: dict[nn.Module, str], config: RMMConfig) -> dict[nn.Module, PackedChoice]:
    """Map modules to what they save, for those of the selected operations that save something that can be packed."""
    found = {module: _choice(module, config.for_module(name), config.operations) for module, name in names.items()}
    chosen = {module: choice for module, choice in found.items() if choice is not None}
    within = _within_regions(chosen, names, config)
    # A norm between linear layers saves for the later one.
    chosen = {module: choice for module, choice in chosen.items() if module not in within or choice.operation == "norm"}
    names = {module: name for module, name in names.items() if module not in within}
    inside = _add_activations(chosen, names, config) if "activation" in config.operations else set[nn.Module]()
    for module, name in names.items():
        if module not in inside and module not in chosen and not is_linear_like(module):
            choice = _calls(module, config.for_module(name))
            # What another operation would convert is not chosen for its code, where that is not selected.
            if choice is not None and _choice(module, config, OPERATIONS) is None:
                chosen[module] = choice
    return {module: choice for module, choice in chosen.items() if module not in inside}


def _add_activations(
    chosen: dict[nn.Module, PackedChoice], names: Mapping[nn.Module, str], config: RMMConfig
) -> set[nn.Module]:
    """Choose gated MLPs and elementwise code; return the modules inside of them, which save nothing of their own."""
    gated = {module: parts for module in names if (parts := gated_parts(module)) is not None}
    # The activation of a gated MLP saves nothing of its own, unless it or the MLP is to stay as it is.
    inside: set[nn.Module] = set()
    for module, parts in gated.items():
        act = parts.act_of(module)
        if parts.act is None or _skip_reason(act, f"{names[module]}.{parts.act}", config) is None:
            chosen[module] = _gated(module, config.for_module(names[module]), parts)
            if _skip_reason(module, names[module], config) is None:
                inside.add(act)
        else:
            inside.add(module)
    functions = {module: pointwise_function(module) for module in names if module not in inside}
    for module, function in functions.items():
        if function is not None:
            bits = config.for_module(names[module]).activation_bits
            chosen[module] = _pointwise(module, function, function.bits(bits))
        elif module not in chosen and module not in inside:
            within = [one for one in _between(module) if one in names]
            form = elementwise_form(module, widths_of(module))
            if form is None or any(_skip_reason(one, names[one], config) is not None for one in within):
                continue
            if _skip_reason(module, names[module], config) is None:
                inside.update(_between(module))
            saved = f"its derivatives, {gated_bits(config.for_module(names[module]))} bits"
            set_up = _change_class(module, PackedElementwise, form=form)
            chosen[module] = PackedChoice("activation", module, saved, set_up)
    return inside


def _calls(module: Any, config: RMMConfig) -> PackedChoice | None:
    """Choose a module whose own code calls functions that save something."""
    sites = calls_of(module, config.operations)
    if not sites:
        return None
    found = {operation_of(one) for one in sites}
    operation = next(one for one in ("linear", *OPERATIONS) if one in found)
    named = ", ".join(dict.fromkeys(one.name.rpartition(".")[2] for one in sites))
    set_up = _change_class(module, PackedCalls, operation=operation)
    return PackedChoice(operation, module, f"what its code saves for {named}, in few bits", set_up, is_called=True)


def _within_regions(
    choices: Mapping[nn.Module, PackedChoice], names: Mapping[nn.Module, str], config: RMMConfig
) -> set[nn.Module]:
    """Return the modules between the linear layers of modules whose attention is a region."""
    regions = [one for one, choice in choices.items() if choice.is_region]
    return {inner for one in regions if _skip_reason(one, names[one], config) is None for inner in _between(one)}


def _choice(module: Any, config: RMMConfig, operations: Sequence[str]) -> PackedChoice | None:
    if "dropout" in operations and is_dropout(module):
        saved = "its seed, or without kernels 1 bit per element" if config.fused else "1 bit per element"
        return PackedChoice("dropout", module, saved, _change_class(module, PackedDropout))
    if "norm" in operations and (form := norm_of(module)) is not None:
        set_up = _change_class(module, PackedNorm, form=form)
        return PackedChoice("norm", module, f"its rows, {config.norm_bits} bits", set_up, form)
    if "norm" in operations and is_channel_norm(module):
        saved = f"its normalized input, {config.norm_bits} bits"
        return PackedChoice("norm", module, saved, _change_class(module, PackedChannelNorm))
    if "pooling" in operations and is_max_pool(module):
        saved = f"places of its maxima, {bits_of(module)} bits"
        return PackedChoice("pooling", module, saved, _change_class(module, PackedPool))
    if "pooling" in operations and is_average_pool(module):
        return PackedChoice("pooling", module, "its input's sizes", _change_class(module, PackedAveragePool))
    if "experts" in operations and is_experts(module):
        bits = f"{experts_bits(config):g} bits"
        saved = f"tokens and products, {bits}; the gate's derivative, {config.activation_bits} bits"
        return PackedChoice("experts", module, saved, _change_class(module, PackedExperts))
    if "attention" in operations and (choice := _attention(module, config.attention_bits)) is not None:
        return choice
    if "attention" in operations and is_softmax(module):
        saved = f"its probabilities, {config.attention_bits} bits"
        return PackedChoice("attention", module, saved, _change_class(module, PackedSoftmax))
    if "convolution" in operations and is_convolution(module) and not _convolves(module):
        saved = f"its input, {experts_bits(config):g} bits"
        return PackedChoice("convolution", module, saved, _change_class(module, PackedConvolution))
    return None


def _convolves(module: nn.Module) -> bool:
    """Say whether a convolution calls PyTorch's function by code of its own."""
    return why_own(module) is not None and bool(calls_of(module, ("convolution",)))


def _attention(module: Any, bits: int) -> PackedChoice | None:
    is_called = is_attention(module)
    linears = _linears(module) if not calls_attention(module) and _is_light(module) else []
    if linears and not (is_called and stays_exact(module) is None) and reads_softmax(module):
        set_up = _change_class(module, PackedRegion, linears=linears)
        saved = f"outputs of its linear layers, {bits} bits"
        return PackedChoice("attention", module, saved, set_up, is_region=True)
    if is_called or calls_attention(module):
        options = {"linears": linears} if is_called else {}
        set_up = _change_class(module, PackedAttention if is_called else PackedAttentionCaller, **options)
        return PackedChoice("attention", module, f"queries, keys and values, {bits} bits", set_up)
    return None


def _linears(module: nn.Module) -> list[str]:
    """Return the names of a module's children that are linear layers, with adapters or without."""
    children = module.named_children()
    return [name for name, child in children if is_linear_like(getattr(child, "base_layer", child))]


def widths_of(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return in_features and out_features of the children that are linear layers, by name."""
    widths = {name: width_of(module.get_submodule(name)) for name in _linears(module)}
    return {name: width for name, width in widths.items() if width is not None}


def _is_light(module: nn.Module) -> bool:
    """Say whether there are no linear layers nor experts between a module's own linear layers."""
    between = _between(module)
    parameters = [one for inner in (module, *between) for one in inner.parameters(recurse=False)]
    if any(map(is_linear_like, between)) or any(map(is_lazy, parameters)):
        return False
    return all(one.dim() < 3 or 1 in one.shape for one in parameters)


def _between(module: nn.Module) -> list[nn.Module]:
    """Return the modules inside of one that are in none of its linear layers."""
    linears = {inner for name in _linears(module) for inner in module.get_submodule(name).modules()}
    return [inner for inner in module.modules() if inner is not module and inner not in linears]


def _gated(module: Any, config: RMMConfig, parts: GatedParts) -> PackedChoice:
    saved = f"two products of the gate, {gated_bits(config)} bits"
    return PackedChoice("activation", module, saved, _change_class(module, PackedGatedMLP, parts=parts), parts)


def _pointwise(module: Any, function: Pointwise, bits: int) -> PackedChoice:
    saved = f"its derivative, {bits} bit{'s' if bits > 1 else ''}{', exact' if function.is_exact else ''}"
    return PackedChoice("activation", module, saved, _change_class(module, PackedActivation, bits=bits))


def chunked_head(module: nn.Module) -> PackedChoice:
    """Make the choice for an output layer whose logits are not to be saved."""
    saved = "no logits: the loss is computed in chunks"
    return PackedChoice("logits", module, saved, _change_class(module, ChunkedHead))


def _change_class(
    module: Any, packed: type[PackedModule], **options: Any
) -> Callable[[RMMConfig, ModelContext, int], None]:
    def set_up(config: RMMConfig, context: ModelContext, index: int) -> None:
        module.__class__ = joined_class(packed, type(module))
        module._set_up(config, context, index, **options)

    return set_up


def choose_heads(
    model: nn.Module, config: RMMConfig, names: dict[nn.Module, str], sketched: Container[str]
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Choose the output layers that are to compute the loss in chunks; say of others over a vocabulary why not."""
    chosen: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    is_fused = any(_is_fused(module) for module in model.modules() if hasattr(module, "get_output_embeddings"))
    for head in output_heads(model):
        name = names.get(head)
        if name is None:
            continue
        reason = replaced_reason(head)
        if config.exclude_modules is not None and matches(config.exclude_modules, name):
            reason = "in exclude_modules"
        elif name in sketched:
            reason = "its input is sketched, so its logits stay as they are"
        elif is_fused:
            reason = "Liger's fused loss is on, which computes no logits"
        elif type(head) is not nn.Linear:
            reason = f"its logits stay as they are: it is a {type(head).__name__}, not nn.Linear itself"
        if reason is None:
            chosen[name] = head
        else:
            skipped[name] = reason
    return chosen, skipped


def _is_fused(module: Any) -> bool:
    """Say whether a module's forward, its own or its class's, comes from Liger."""
    forward = inspect.unwrap(module.forward)
    source = getattr(getattr(forward, "__func__", forward), "__module__", None) or ""
    return source.split(".")[0] == "liger_kernel"


Places = set[tuple[str, torch.dtype]]  # types of devices, and dtypes

NOWHERE = (
    "fused=True has no effect on {}, where Triton's kernels do not run: activations, norms, gated MLPs and "
    "dropout compute their outputs themselves there, as without it."
)
_SOME = "fused=True has no effect on {}{}."  # names, and one of the following
_NO_KERNELS = ": on {}, Triton's kernels do not run"
_IN_PLACE = ": modules that work in place stay as they are"
_UNKNOWN = ": how they round is not known"
_CHANNELS = ": norms over channels have no such kernel"
_AUTOCAST = " under autocast, which chooses a dtype for each function"


def why_unfused(model: nn.Module, choices: Mapping[str, PackedChoice], config: RMMConfig) -> str | None:
    """Say where ``fused=True`` has no effect on a model, and why: a line for every reason, or None."""
    everywhere, found = _places(model), dict[str, list[str]]()
    asked = {name: one for name, one in choices.items() if one.operation in ("activation", "norm", "dropout")}
    asked = {name: one for name, one in asked.items() if not one.is_called}
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
    """Say why the module's own output stays, always or under autocast, where kernels run."""
    module, computes = choice.module, choice.computes
    if isinstance(computes, NormForm):
        return _AUTOCAST if casts_of(module, computes) else _UNKNOWN
    if choice.operation == "norm":
        return _CHANNELS
    if isinstance(computes, GatedParts):
        module = computes.act_of(module)
    elif getattr(module, "inplace", False):
        return _IN_PLACE
    elif choice.operation == "dropout":
        return None
    return _AUTOCAST if is_composed(module) else None


def _no_kernels(module: nn.Module, everywhere: Places) -> str | None:
    """Return the module's device if no kernels run there; one without parameters is where the model is."""
    places = _places(module) or everywhere
    has_kernels = not places or any(backend_of(device, dtype) == "triton" for device, dtype in places)
    return None if has_kernels else _named(places)


def _places(module: nn.Module) -> Places:
    return {(parameter.device.type, parameter.dtype) for parameter in module.parameters()}


def _named(places: Places) -> str:
    return " and ".join(sorted(f"{device} ({str(dtype).removeprefix('torch.')})" for device, dtype in places))


def _siblings(names: list[str]) -> str:
    """Return the names, of numbered siblings what they have in common."""
    return ", ".join(pattern or "the model" for pattern in folded(names))
