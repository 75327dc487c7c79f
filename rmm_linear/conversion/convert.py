"""convert and revert: swap a model's linear layers for sketched ones, in place, and back."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from rmm_linear._support.distributed import is_dtensor, is_fsdp_module
from rmm_linear.config import RMMConfig
from rmm_linear.context.model_context import ModelContext
from rmm_linear.conversion.names import is_conv1d, matches, nearest, not_selected, output_heads
from rmm_linear.conversion.report import ConversionReport, ConvertedLayer
from rmm_linear.layers.base import SketchedLayer
from rmm_linear.layers.linear import RMMLinear
from rmm_linear.memory.inputs import layer_inputs, unsaved_reason

logger = logging.getLogger(__name__)


def convert(
    model: nn.Module,
    config: RMMConfig | None = None,
    *,
    dry_run: bool = False,
    example: Any = None,
    **overrides: Any,
) -> ConversionReport:
    """Make a model's linear layers save a sketch of their input for the backward pass, in place.

    ``nn.Linear`` layers become :class:`~rmm_linear.RMMLinear`, GPT-2's ``Conv1D`` layers the sketched ``Conv1D``. The
    layer objects, their parameters, hooks and the state_dict stay the same, so an optimizer made before keeps working.
    Names are matched as in PEFT. Everything is checked before the first layer changes. Two conditions are logged as
    warnings: an entry of ``target_modules`` that matches nothing, and a model in which no converted weight requires a
    gradient.

    Args:
        model: Model whose submodules are converted.
        config: Selects the layers and how each is sketched; None is ``RMMConfig()``.
        dry_run: Report what would be done and change nothing.
        example: A training batch (keyword arguments, a sequence of arguments, or one argument). The model runs on it
            once, and layers where a sketch would add bytes, because another operation saves their input anyway, are
            skipped.
        **overrides: Fields of :class:`~rmm_linear.RMMConfig` that replace those of ``config``, such as ``ratio=0.2``.

    Returns:
        What was converted and what was skipped, with the reason. Print it.

    Raises:
        ValueError: If nothing matches (the message has the nearest layer names), an override matches nothing, no sketch
            would save bytes on ``example``, or the model is converted already.
        TypeError: If ``config`` is not an RMMConfig or a keyword is not one of its fields.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> list(convert(model, target_modules=["0"]).converted)
        ['0']
        >>> model[0]
        RMMLinear(in_features=8, out_features=8, bias=True, kind=countsketch, memory=0.1, bits=auto, min_rows=64)
    """
    config = _configuration(config, overrides)
    names = _first_names(model)
    if any(isinstance(module, SketchedLayer) for module in names):
        raise ValueError(
            "convert takes a model that is not converted yet, got one with sketched layers. "
            "Call rmm_linear.revert(model) first."
        )
    chosen, skipped = _choose(model, config, names)
    if example is not None:
        _skip_where_nothing_is_saved(model, config, example, chosen, skipped)
    converted = {
        name: ConvertedLayer(
            name, type(module).__name__, *_features(module), config.for_module(name), not _is_trained(module)
        )
        for name, module in chosen.items()
    }
    if all(layer.frozen for layer in converted.values()):
        logger.warning(
            "No weight of the %d layers to convert requires a gradient, so they save nothing with or without a sketch, "
            "until they are unfrozen. Convert a model that trains linear layers, as lora_A after get_peft_model.",
            len(converted),
        )
    if dry_run:
        return ConversionReport(config, converted, skipped, dry_run)
    classes = {name: _sketched_class(module) for name, module in chosen.items()}
    context = ModelContext(list(chosen), config if example is None else _restricted(config, list(chosen)))
    context.attach(model)
    for index, (name, module) in enumerate(chosen.items()):
        # The object stays the same, so tied weights, hooks, optimizers and references to it remain valid.
        module.__class__ = classes[name]
        module._set_up(converted[name].config, context, index)  # pyright: ignore[reportCallIssue]
    report = ConversionReport(config, converted, skipped, context=context)
    logger.info(report.summary())
    return report


def _restricted(config: RMMConfig, chosen: list[str]) -> RMMConfig:
    """Return a configuration that selects the chosen layers without an example."""
    overrides = {
        pattern: changes
        for pattern, changes in config.overrides.items()
        if any(config.override_pattern(name) == pattern for name in chosen)
    }
    return config.replace(target_modules=chosen, exclude_modules=None, overrides=overrides)


def revert(model: nn.Module) -> nn.Module:
    """Give every sketched layer of a model its original class back, in place.

    Args:
        model: A converted model, or part of one.

    Returns:
        The same model, exact again.

    Raises:
        ValueError: If the model has no sketched layer.
    """
    layers = [module for module in model.modules() if isinstance(module, SketchedLayer)]
    if not layers:
        raise ValueError(
            "revert takes a converted model, got one without sketched layers. Call rmm_linear.convert first."
        )
    for layer in layers:
        if layer.rmm_context is not None:
            layer.rmm_context.release()
        layer._tear_down()
        layer.__class__ = _original_class(type(layer))
    return model


def _original_class(kind: type[nn.Module]) -> type[Any]:
    """Return the class without the sketch; a class that PyTorch derived (fully_shard, parametrize) is derived again."""
    if not kind.__module__.startswith("torch."):
        return next(c for c in kind.__mro__ if not issubclass(c, SketchedLayer))
    bases = tuple(_original_class(base) if issubclass(base, SketchedLayer) else base for base in kind.__bases__)
    own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__.replace("RMM", ""), bases, own)


def _configuration(config: RMMConfig | None, overrides: dict[str, Any]) -> RMMConfig:
    if config is not None and not isinstance(config, RMMConfig):
        raise TypeError(f"config must be an RMMConfig or None, got {type(config).__name__}. Use RMMConfig.from_dict.")
    known = [f.name for f in dataclasses.fields(RMMConfig)]
    for name in overrides:
        if name not in known:
            raise TypeError(f"convert takes the fields of RMMConfig, got {name!r}. The fields are {', '.join(known)}.")
    return (config or RMMConfig()).replace(**overrides)


def _first_names(model: nn.Module) -> dict[nn.Module, str]:
    """Map every submodule but the model itself to the first of its names."""
    return {module: name for name, module in model.named_modules() if name}


def _choose(
    model: nn.Module, config: RMMConfig, names: dict[nn.Module, str]
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    linears = {name: module for module, name in names.items() if _is_linear_like(module)}
    if not linears:
        itself = " Use RMMLinear.from_linear for a layer by itself." if _is_linear_like(model) else ""
        raise ValueError(f"convert needs a model with linear layers, got {type(model).__name__} without any.{itself}")
    heads = output_heads(model)
    chosen: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    for name, module in linears.items():
        reason = not_selected(name, module, config, heads) or _not_convertible(module)
        if reason:
            skipped[name] = reason
        else:
            chosen[name] = module
    if not chosen:
        raise ValueError(_nothing_matches(config, linears, skipped))
    _check_used(config, linears, list(chosen))
    return chosen, skipped


def _skip_where_nothing_is_saved(
    model: nn.Module, config: RMMConfig, example: Any, chosen: dict[str, nn.Module], skipped: dict[str, str]
) -> None:
    inputs, _ = layer_inputs(model, example, list(chosen))
    for name, seen in inputs.items():
        features = _features(chosen[name])[0]
        spec = config.for_module(name).spec(seen.tokens, features, seen.itemsize)
        if spec is None:
            continue  # exact, as before
        size = spec.bytes(seen.tokens, features, seen.itemsize)
        reason = unsaved_reason(seen)
        if reason is None and size >= seen.bytes:
            reason = f"its sketch of {size} bytes is no smaller than its input of {seen.bytes}"
        if reason is not None:
            del chosen[name]
            skipped[name] = reason
    if not chosen:
        raise ValueError(
            f"convert needs a layer where a sketch saves bytes, and on this example none does "
            f"({'; '.join(f'{n}: {r}' for n, r in list(skipped.items())[:3])}). Leave the model as it is."
        )


def _not_convertible(module: nn.Module) -> str | None:
    kind = type(module)
    if is_fsdp_module(module):
        return f"it was sharded by itself, as {kind.__name__}: call convert before fully_shard"
    if not (kind is nn.Linear or is_conv1d(module)):
        return f"{kind.__name__} is a class of its own; only nn.Linear itself and Conv1D are converted"
    if _is_tensor_parallel(module):
        return "tensor parallel layers cannot be sketched, DDP and fully_shard can"
    if "forward" in vars(module):
        return "its forward method was replaced on the object (by hooks of accelerate, for example)"
    return None


def _is_tensor_parallel(module: nn.Module) -> bool:
    """Detected by DTensor parameters or transformers' plan; FSDP's weights are DTensors too, between forward passes."""
    is_distributed = any(is_dtensor(parameter) for parameter in module.parameters(recurse=False))
    is_sharded = getattr(module, "_is_fsdp_managed_module", False) and "forward" not in vars(module)
    return (is_distributed and not is_sharded) or getattr(module, "_hf_tp_plan", None) is not None


def _is_trained(module: nn.Module) -> bool:
    return module.weight.requires_grad  # pyright: ignore[reportReturnType]


def _is_linear_like(module: nn.Module) -> bool:
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return True
    looks_linear = re.search(r"[Ll]inear|Conv1D$", type(module).__name__) or hasattr(module, "in_features")
    has_tensors = any(True for tensors in (module.parameters(), module.buffers()) for _ in tensors)  # any name
    return bool(looks_linear) and has_tensors and not any(module.children())


def _features(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    inputs, outputs = module.weight.shape  # pyright: ignore[reportGeneralTypeIssues]
    return int(inputs), int(outputs)


def _sketched_class(module: nn.Module) -> type[nn.Module]:
    if isinstance(module, nn.Linear):
        return RMMLinear
    from rmm_linear.layers.conv1d import RMMConv1D

    return RMMConv1D


def _nothing_matches(config: RMMConfig, linears: dict[str, nn.Module], skipped: dict[str, str]) -> str:
    target = config.target_modules
    if all(reason == "not in target_modules" for reason in skipped.values()):
        pattern = target if isinstance(target, str) else target[0]
        rule = "a regular expression for the whole name" if isinstance(target, str) else "names or dotted suffixes"
        shown = target if isinstance(target, str) else list(target)
        return (
            f"target_modules must match a linear layer ({rule}), got {shown!r}, which matches none. "
            f"The nearest layers are {nearest(pattern, list(linears))}."
        )
    named: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        named.setdefault(reason, []).append(name)
    more = {reason: f" and {len(names) - 1} more" if len(names) > 1 else "" for reason, names in named.items()}
    reasons = "; ".join(f"{names[0]}{more[reason]}: {reason}" for reason, names in list(named.items())[:3])
    return (
        f"convert needs a layer to convert, and all {len(skipped)} linear layers are skipped ({reasons}). "
        f"Change target_modules ({target!r}) or exclude_modules ({config.exclude_modules!r})."
    )


def _check_used(config: RMMConfig, linears: dict[str, nn.Module], chosen: Sequence[str]) -> None:
    for pattern in config.overrides:
        single = dataclasses.replace(config, overrides={pattern: {}})
        if not any(single.override_pattern(name) for name in chosen):
            raise ValueError(
                f"overrides[{pattern!r}] must match a converted layer, and matches none. "
                f"The nearest layers are {nearest(pattern, list(chosen))}."
            )
    if not isinstance(config.target_modules, str):
        for entry in config.target_modules:
            if not any(matches([entry], name) for name in linears):
                logger.warning(
                    "target_modules: %r matches no linear layer; the nearest are %s.",
                    entry,
                    nearest(entry, list(linears)),
                )
