"""Convert a model's modules in place, so that they save compressed activations for the backward pass."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rmm_linear._support.validation import did_you_mean
from rmm_linear.activations.own_forward import follow_class, without_tiles
from rmm_linear.config import RMMConfig
from rmm_linear.context.first_steps import CHECKPOINTED, checkpointed_message, shown
from rmm_linear.context.model_context import ModelContext
from rmm_linear.conversion.checkpointed import checkpointed_blocks, inside, noting_recomputed
from rmm_linear.conversion.exact import unconvert
from rmm_linear.conversion.explained import explained, keep_exact_on
from rmm_linear.conversion.filtering import check_filter, without_rejected
from rmm_linear.conversion.linears import (
    choose_linears,
    linear_features,
    nothing_matches,
    sketched_class,
    skip_where_nothing_is_saved,
    warn_of_unmatched,
    warn_of_unmatched_exclusions,
)
from rmm_linear.conversion.names import check_overrides, first_names, restricted
from rmm_linear.conversion.packed import (
    PackedChoice,
    choose_heads,
    choose_packed,
    chunked_head,
    outside_experts,
    why_unfused,
)
from rmm_linear.conversion.remaining import uncompressed
from rmm_linear.conversion.report import ConversionReport, ConvertedLayer, PackedEntry
from rmm_linear.layers.converted import ConvertedModule
from rmm_linear.memory.inputs import check_example

logger = logging.getLogger(__name__)


def convert(
    model: nn.Module,
    config: RMMConfig | None = None,
    *,
    quality: str | None = None,
    dry_run: bool = False,
    example: Any = None,
    filter: Callable[[nn.Module, str], Any] | None = None,
    **overrides: Any,
) -> ConversionReport:
    """Make a model's modules save compressed activations for the backward pass. Outputs stay the same to the bit.

    The model changes in place: ``nn.Linear`` layers become :class:`~rmm_linear.RMMLinear`, GPT-2's ``Conv1D`` layers
    the sketched ``Conv1D``; the other operations' modules get a class derived from their own. The objects, their
    parameters, hooks and the state_dict stay the same, so an optimizer made before keeps working. Names are matched as
    in PEFT. Everything is checked before the first module changes. Three conditions are logged as warnings: an entry of
    ``target_modules`` that matches nothing, a conversion of linear layers alone, none of whose weights requires a
    gradient, and modules that activation checkpointing recomputes, see ``RMMConfig.checkpointed``.

    Args:
        model: Model whose submodules are converted.
        config: Selects the layers and how each is saved; None is ``RMMConfig()``.
        quality: "careful", "default" or "smallest", instead of ``config``: see :meth:`RMMConfig.preset`.
        dry_run: Report what would be done and change nothing.
        example: A training batch (keyword arguments, a sequence of arguments, or one argument). The model runs on it,
            forward alone, and layers where a sketch would add bytes, because another operation saves their input
            anyway, are skipped (without it, they are exact from the second training step on). The report then has the
            bytes that the whole model saves, before and after, unless the exact model runs out of memory.
        filter: Called with every module that would be converted, of any operation, and its name; those for which it
            returns False stay exact. The report's configuration, which is saved, names them in ``exclude_modules``.
        **overrides: Fields of :class:`~rmm_linear.RMMConfig` that replace those of ``config``, such as ``ratio=0.2``.

    Returns:
        The modules that were converted and those that were skipped, with the reason. Print it.

    Raises:
        ValueError: If nothing matches (the message has the nearest layer names), an override matches nothing, nothing
            would save bytes on ``example``, it is on another device, ``filter`` accepts no module, or the model is
            converted already.
        TypeError: If ``model`` is not a module, ``config`` is not an RMMConfig, ``filter`` is not a function, a keyword
            is not a field of RMMConfig, or ``example`` is no batch, or none that the model can be called with.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> list(convert(model, target_modules=["0"]).converted)
        ['0']
        >>> model[0]
        RMMLinear(in_features=8, out_features=8, bias=True, kind=countsketch, bits=3, min_rows=64)
    """
    config = _configuration(config, quality, overrides)
    _check_model(model)
    check_filter(filter)
    if example is not None:
        check_example(model, example)
    names = first_names(model)
    if any(isinstance(module, ConvertedModule) for module in names):
        raise ValueError(
            "convert takes a model that is not converted yet, got one with converted modules. "
            "Call rmm_linear.revert(model) first."
        )
    with without_tiles(model):
        rejected = set[str]()
        if filter is not None:
            accepted = functools.partial(_accepted, model, names)
            config, rejected = without_rejected(config, filter, accepted, names)
        report, linears, packed = _choose(model, config, names, example, rejected)
    if dry_run:
        return dataclasses.replace(report, dry_run=True)
    sketched = {name: sketched_class(module) for name, module in linears.items()}
    if example is not None:
        config = restricted(config, _operations(linears, packed), names.values())
    context = ModelContext([*linears, *packed], config)
    context.attach(model)
    context.checks.note_model(model)
    for index, (name, module) in enumerate(linears.items()):
        # The object stays the same, so tied weights, hooks, optimizers and references to it remain valid.
        module.__class__ = sketched[name]
        follow_class(module)
        module._set_up(report.converted[name].config, context, index)  # pyright: ignore[reportCallIssue]
    _set_up_packed(packed, config, context)
    report = dataclasses.replace(report, context=context)
    logger.info(report.summary())
    if recomputed := [name for name in report.checkpointed if config.for_module(name).checkpointed == "exact"]:
        logger.warning(checkpointed_message(recomputed, context.names, model))
        context.checks.said.add(CHECKPOINTED)
    if example is not None:
        try:
            keep_exact_on(model, context, example)
            report = dataclasses.replace(report, memory=explained(model, report, example))
        except torch.OutOfMemoryError:  # of the exact model, for want of which it is converted
            logger.warning("What the whole model saves is not known: the exact one runs out of memory on the example.")
        except BaseException:
            unconvert(model)
            raise
    return report


def _choose(
    model: nn.Module, config: RMMConfig, names: dict[nn.Module, str], example: Any, rejected: set[str]
) -> tuple[ConversionReport, dict[str, nn.Module], dict[str, PackedChoice]]:
    """Return what is to be converted, as a report, and the modules themselves."""
    is_sketching, names = "linear" in config.operations, outside_experts(names, config)
    linears, packed, skipped, unpacked = _select(model, config, names)
    if is_sketching:
        warn_of_unmatched(config, names)
    warn_of_unmatched_exclusions(config, names)
    is_selected = config.target_modules != RMMConfig.target_modules
    is_met = linears or any(choice.operation == "linear" for choice in packed.values())
    if is_sketching and not is_met and (is_selected or not packed):
        raise ValueError(nothing_matches(model, config, skipped))
    check_overrides(config, _operations(linears, packed))
    blocks = set(checkpointed_blocks(model))
    if example is not None:
        outside, unsaved = dict(linears), dict[str, str]()
        # A packed operation does not save a linear layer's input any more.
        with packed_only(model, config, packed), noting_recomputed(model) as noted:
            skip_where_nothing_is_saved(model, config, example, outside, unsaved)
        blocks |= noted.names
        recomputed = inside(blocks, linears)  # of their inputs, the example shows nothing
        linears = {name: module for name, module in linears.items() if name in recomputed or name in outside}
        skipped |= {name: reason for name, reason in unsaved.items() if name not in recomputed}
    if not linears and not packed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list((skipped | unpacked).items())[:3])
        raise ValueError(
            f"convert needs a module where something is saved, of the operations {', '.join(config.operations)}, and "
            f"this model has none{f' ({reasons})' if reasons else ''}. Leave the model as it is."
        )
    converted = {
        name: ConvertedLayer(
            name, type(module).__name__, *linear_features(module), config.for_module(name), not _is_trained(module)
        )
        for name, module in linears.items()
    }
    if (linears or packed) and not any(parameter.requires_grad for parameter in model.parameters()):
        logger.warning(
            "No parameter of the model requires a gradient, so a training step saves hardly anything, converted or "
            "not. Unfreeze the model, or put adapters on it, before."
        )
    elif converted and not packed and all(layer.frozen for layer in converted.values()):
        logger.warning(
            "No weight of the %d layers to convert requires a gradient, so they save nothing with or without a sketch, "
            "until they are unfrozen. Convert a model that trains linear layers, as lora_A after get_peft_model.",
            len(converted),
        )
    else:
        _say_before_the_first_trained(model, [*linears, *packed])
    stand_ins = {
        name: PackedEntry(name, type(choice.module).__name__, choice.operation, choice.saved, config.for_module(name))
        for name, choice in packed.items()
    }
    report = ConversionReport(
        config,
        converted,
        skipped | unpacked | {name: "rejected by filter" for name in names.values() if name in rejected},
        packed=stand_ins,
        checkpointed=inside(blocks, [*linears, *packed]),
        unfused=why_unfused(model, packed, config),
        is_eval=not model.training,
    )
    return dataclasses.replace(report, uncompressed=uncompressed(names, report)), linears, packed


def _say_before_the_first_trained(model: nn.Module, chosen: list[str]) -> None:
    """Say that most modules save nothing where a head alone is trained: no gradient comes to what runs before it."""
    first = next(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    owner, order = first.rpartition(".")[0], {name: place for place, (name, _) in enumerate(model.named_modules())}
    before = [name for name in chosen if order.get(name, len(order)) < order[owner]]
    # Prompts come after the model that they run before.
    if 2 * len(before) > len(chosen) and not isinstance(model.get_submodule(owner), nn.Embedding):
        logger.warning(
            "The first parameter that is trained is %s. What runs before it saves nothing, converted or not: probably "
            "%d of the %d modules to convert (%s).",
            first,
            len(before),
            len(chosen),
            shown(before),
        )


def _select(
    model: nn.Module, config: RMMConfig, names: dict[nn.Module, str]
) -> tuple[dict[str, nn.Module], dict[str, PackedChoice], dict[str, str], dict[str, str]]:
    """Return the linear layers and the other modules that a configuration selects, and why not the others of each."""
    linears, skipped = choose_linears(model, config, names) if "linear" in config.operations else ({}, {})
    packed, unpacked = choose_packed(names, config)
    if "logits" in config.operations:
        heads, unchunked = choose_heads(model, config, names, linears)
        packed |= {name: chunked_head(head) for name, head in heads.items()}
        unpacked |= unchunked
        skipped = {name: reason for name, reason in skipped.items() if name not in heads}
    return linears, packed, skipped, unpacked


def _accepted(model: nn.Module, names: dict[nn.Module, str], config: RMMConfig) -> dict[str, nn.Module]:
    linears, packed, *_ = _select(model, config, outside_experts(names, config))
    return linears | {name: choice.module for name, choice in packed.items()}


@contextmanager
def packed_only(model: nn.Module, config: RMMConfig, choices: Mapping[str, PackedChoice]) -> Iterator[None]:
    """Convert all operations but linear layers inside of the block."""
    if not choices:
        yield
        return
    _set_up_packed(choices, config, ModelContext(list(choices)))
    try:
        yield
    finally:
        unconvert(model)


def _set_up_packed(choices: Mapping[str, PackedChoice], config: RMMConfig, context: ModelContext) -> None:
    for index, (name, choice) in enumerate(choices.items(), start=len(context.names) - len(choices)):
        choice.set_up(config.for_module(name), context, index)
        follow_class(choice.module)


def _operations(linears: Mapping[str, nn.Module], packed: Mapping[str, PackedChoice]) -> dict[str, str]:
    return dict.fromkeys(linears, "linear") | {name: choice.operation for name, choice in packed.items()}


def _is_trained(module: nn.Module) -> bool:
    return module.weight.requires_grad  # pyright: ignore[reportReturnType]


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        remedy = f"Make an instance first: {model.__name__}(...)." if isinstance(model, type) else "Pass the model."
        raise TypeError(f"model must be a torch.nn.Module, got {got}. {remedy}")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ValueError(
            "convert takes a model whose modules are Python objects, got one with modules of torch.jit.script or "
            "torch.jit.trace, whose classes cannot change. Convert the model that they were made from."
        )
    unflatten = sys.modules.get("torch.export.unflatten")
    if unflatten is not None and any(isinstance(module, unflatten.InterpreterModule) for module in model.modules()):
        raise ValueError(
            "convert takes a model whose modules have code of their own, got one that torch.export has made, as for "
            "torch.distributed.pipelining.pipeline(). Make the stages by hand, and convert each of them."
        )
    # With one device or none, DataParallel calls the model itself.
    if any(isinstance(module, nn.DataParallel) and len(module.device_ids) > 1 for module in model.modules()):
        raise ValueError(
            "convert takes a model that trains in place, got one with DataParallel, which makes copies of it in every "
            "step that share neither seeds nor masks. Use torch.nn.parallel.DistributedDataParallel."
        )


def _configuration(config: RMMConfig | None, quality: str | None, overrides: dict[str, Any]) -> RMMConfig:
    if config is not None and not isinstance(config, RMMConfig):
        hint = f"quality={config!r}" if isinstance(config, str) else "RMMConfig.from_dict"
        raise TypeError(f"config must be an RMMConfig or None, got {type(config).__name__}. Use {hint}.")
    known = [f.name for f in dataclasses.fields(RMMConfig)]
    for name in overrides:
        if name not in known:
            raise TypeError(
                f"convert takes the fields of RMMConfig, got {name!r}. The fields are {', '.join(known)}."
                f"{did_you_mean(name, known)}"
            )
    if config is not None and quality is not None:
        raise ValueError(
            f"config and quality exclude each other, got both and quality={quality!r}. Give one, or "
            f"config=RMMConfig.preset({quality!r}, ...) with the fields that differ."
        )
    if config is None:
        config = RMMConfig.preset("default" if quality is None else quality)
    return config.replace(**overrides)
