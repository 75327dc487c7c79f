"""Choose the linear layers to convert, and say why the others are not."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rmm_linear._support.distributed import is_dtensor, is_fsdp_module, shape_of
from rmm_linear._support.patterns import matches
from rmm_linear._support.validation import did_you_mean
from rmm_linear.activations.calls import calls_of
from rmm_linear.activations.own_forward import runs_its_class
from rmm_linear.config import RMMConfig
from rmm_linear.context.directions import Directions
from rmm_linear.conversion.names import is_conv1d, nearest, not_selected, output_heads
from rmm_linear.layers.converted import joined_class
from rmm_linear.layers.linear import RMMLinear
from rmm_linear.memory.inputs import layer_inputs, unsaved_reason
from rmm_linear.memory.quantized import QUANTIZERS

logger = logging.getLogger(__name__)

_NARROW = 32  # times fewer features than the widest layer's input: that share of its bytes
_QUANTIZED_WEIGHTS = (*QUANTIZERS, "torchao")  # layers of torchao's may train
QUANTIZED = "is quantized: convert the model before quantization, or after get_peft_model has put adapters on it"


def choose_linears(
    model: nn.Module, config: RMMConfig, names: dict[nn.Module, str]
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Choose the linear layers that a configuration converts; and say of the other linear-like ones why not."""
    linears = {name: module for module, name in names.items() if is_linear_like(module)}
    heads = output_heads(model)
    chosen: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    for name, module in linears.items():
        reason = not_selected(name, module, config, heads) or _not_convertible(module)
        if reason:
            skipped[name] = reason
        else:
            chosen[name] = module
    is_frozen = any(module not in heads and not _trains(module) for module in linears.values())
    if config.target_modules == RMMConfig.target_modules and is_frozen:
        skipped |= _narrow(chosen)
        chosen = {name: module for name, module in chosen.items() if name not in skipped}
    return chosen, skipped


def _trains(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def warn_of_unmatched_exclusions(config: RMMConfig, names: dict[nn.Module, str]) -> None:
    excluded, hint = config.exclude_modules, ""
    if isinstance(excluded, str):
        is_entry = any(matches([excluded], name) for name in names.values())
        hint = f" A string is a pattern of whole names; did you mean [{excluded!r}]?" if is_entry else ""
        entries: list[tuple[Any, str]] = [(excluded, excluded)]
    else:
        entries = [([entry], entry) for entry in excluded or ()]
    for pattern, entry in entries:
        if not any(matches(pattern, name) for name in names.values()):
            close = nearest(entry, [*names.values()])
            logger.warning("exclude_modules: %r matches no module; the nearest are %s.%s", entry, close, hint)


def warn_of_unmatched(config: RMMConfig, names: dict[nn.Module, str]) -> None:
    linears = [name for module, name in names.items() if is_linear_like(module)]
    products = [name for module, name in names.items() if calls_of(module, ("linear",))]
    if not isinstance(config.target_modules, str):
        for entry in config.target_modules:
            if not any(matches([entry], name) for name in (*linears, *products)):
                logger.warning(
                    "target_modules: %r matches no linear layer; the nearest are %s.",
                    entry,
                    nearest(entry, linears),
                )


def _narrow(chosen: dict[str, nn.Module]) -> dict[str, str]:
    """Say which trained layers beside frozen ones have inputs that are not worth a code, as ``lora_B`` has."""
    features = {name: linear_features(module)[0] for name, module in chosen.items()}
    widest = max(features.values(), default=0)
    return {
        name: f"its input has {count} features, others up to {widest}: a code would free little"
        for name, count in features.items()
        if count * _NARROW <= widest and chosen[name].weight.requires_grad
    }


def skip_where_nothing_is_saved(
    model: nn.Module, config: RMMConfig, example: Any, chosen: dict[str, nn.Module], skipped: dict[str, str]
) -> None:
    """Move the layers where a sketch adds bytes from ``chosen`` to ``skipped``."""
    inputs, *_ = layer_inputs(model, example, list(chosen))
    for name, seen in inputs.items():
        (features, _), own = linear_features(chosen[name]), config.for_module(name)
        spec = own.spec(seen.tokens, features, seen.itemsize)
        if spec is None:
            continue  # exact, as before
        directions = own.directions if own.memory is None and Directions(own.directions).fits(features) else 0
        size = spec.bytes(seen.tokens, features, seen.itemsize, directions)
        reason = unsaved_reason(seen)
        if reason is None and size >= seen.bytes:
            reason = f"its sketch of {size} bytes is no smaller than its input of {seen.bytes}"
        if reason is not None:
            del chosen[name]
            skipped[name] = reason


def _not_convertible(module: nn.Module) -> str | None:
    kind = type(module)
    if is_quantized(module):
        return f"{kind.__name__} {QUANTIZED}"
    if not is_fsdp_module(module) and not (kind is nn.Linear or is_conv1d(module) or _computes_linear(module)):
        return f"{kind.__name__} is a subclass, whose output is not known to be that of nn.Linear"
    return replaced_reason(module)


def _computes_linear(module: nn.Module) -> bool:
    """Say whether a subclass of ``nn.Linear`` has its parameters alone, and its output to the bit: it is tried once."""
    if not isinstance(module, nn.Linear) or type(module).__module__.startswith("torch."):
        return False
    own, weight = dict(module.named_parameters(recurse=False)), module.weight
    if set(own) - {"weight", "bias"} or any(module.children()):
        return False
    if type(module).forward is nn.Linear.forward:
        return True
    if weight.is_meta or is_dtensor(weight):
        return False
    x = torch.arange(6 * module.in_features, device=weight.device).view(2, 3, -1).sin().to(weight.dtype)
    mode = module.training
    try:
        with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []), torch.enable_grad():
            for module.training in (True, False):
                found, expected = (
                    _outputs(run, x, weight, module.bias)
                    for run in (lambda x: type(module).forward(module, x), lambda x: F.linear(x, weight, module.bias))
                )
                if not all(map(torch.equal, found, expected)):
                    return False
    except Exception:  # of whatever it is written for
        return False
    finally:
        module.training = mode
    return True


def _outputs(
    run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> list[torch.Tensor]:
    """Return an output, and its gradients with respect to all that it should depend on."""
    x = x.detach().requires_grad_()
    output = run(x)
    wanted = [x, *(one for one in (weight, bias) if one is not None and one.requires_grad)]
    return [output, *torch.autograd.grad(output.square().sum(), wanted)]


def replaced_reason(module: nn.Module) -> str | None:
    """Say why the class of a module cannot be changed."""
    if is_fsdp_module(module):
        return f"it was sharded by itself, as {type(module).__name__}: call convert before fully_shard"
    if not runs_its_class(module):
        return "its forward method was replaced on the object (by hooks of accelerate, for example)"
    return None


def is_quantized(module: nn.Module) -> bool:
    """Say whether a module is a quantized layer (torch.ao, bitsandbytes, GPTQ, AWQ, …), or has a torchao weight.

    The packages of its class and weight say so; they are not imported. A parametrized weight is not read: spectral_norm
    would change its buffers.
    """
    weight = None if "parametrizations" in module._modules else getattr(module, "weight", None)
    has_codes = isinstance(weight, torch.Tensor) and not (weight.dtype.is_floating_point and weight.dtype.itemsize > 1)
    return (
        "quantized" in type(module).__module__
        or f"{type(module).__module__}.".startswith(tuple(f"{name}." for name in QUANTIZERS))
        or f"{type(weight).__module__}.".startswith(tuple(f"{name}." for name in _QUANTIZED_WEIGHTS))
        or (has_codes and is_linear_like(module))
    )


def is_linear_like(module: nn.Module) -> bool:
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return True
    looks_linear = re.search(r"[Ll]inear|Conv1D$", type(module).__name__) or hasattr(module, "in_features")
    has_tensors = any(True for tensors in (module.parameters(), module.buffers()) for _ in tensors)  # any name
    return bool(looks_linear) and has_tensors and not any(module.children())


def linear_features(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    inputs, outputs = shape_of(module.weight)  # pyright: ignore[reportArgumentType]
    return int(inputs), int(outputs)


def sketched_class(module: nn.Module) -> type[Any]:
    if isinstance(module, nn.Linear):
        is_itself = type(module) is nn.Linear or is_fsdp_module(module)
        return RMMLinear if is_itself else joined_class(RMMLinear, type(module))
    from rmm_linear.layers.conv1d import RMMConv1D

    return RMMConv1D


def nothing_matches(model: nn.Module, config: RMMConfig, skipped: dict[str, str]) -> str:
    """Say why no linear layer of a model is converted."""
    if not skipped:
        itself = " Use RMMLinear.from_linear for a layer by itself." if is_linear_like(model) else ""
        quantized = sorted({type(m).__qualname__ for m in model.modules() if is_quantized(m)})
        if quantized:
            itself = (
                f" Its layers are quantized ({', '.join(quantized)}) and train no weight. "
                "Convert the model before quantization, or after get_peft_model has put adapters on it."
            )
        what = "linear layers, convolutions, activations, norms, attention or dropout"
        return f"convert needs a model with modules inside ({what}), got {type(model).__name__} without any.{itself}"
    target = config.target_modules
    if all(reason == "not in target_modules" for reason in skipped.values()):
        pattern = target if isinstance(target, str) else target[0]
        rule = "a regular expression for the whole name" if isinstance(target, str) else "names or dotted suffixes"
        shown = target if isinstance(target, str) else list(target)
        meant = did_you_mean(target, ["all-linear"])
        if isinstance(target, str) and any(matches([target], name) for name in skipped):
            meant = f" Did you mean [{target!r}]?"
        return (
            f"target_modules must match a linear layer ({rule}), got {shown!r}, which matches none. "
            f"The nearest layers are {nearest(pattern, list(skipped))}.{meant}"
        )
    named: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        named.setdefault(reason, []).append(name)
    more = {reason: f" and {len(names) - 1} more" if len(names) > 1 else "" for reason, names in named.items()}
    by_remedy = sorted(named, key=lambda reason: QUANTIZED not in reason)  # a reason with a remedy comes first
    reasons = "; ".join(f"{named[reason][0]}{more[reason]}: {reason}" for reason in by_remedy[:3])
    change = f" Change target_modules ({target!r}) or exclude_modules ({config.exclude_modules!r})."
    return (
        f"convert needs a layer to convert, and all {len(skipped)} linear layers are skipped ({reasons})."
        f"{'' if QUANTIZED in reasons else change}"
    )
