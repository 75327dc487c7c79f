"""Select layers by their names, and check that overrides change something.

The prefixes of torch.compile, DDP and FSDP are no part of a name.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from rmm_linear._support.patterns import entries_for, matches
from rmm_linear.config import RMMConfig

# Added by torch.compile, torch's checkpoint_wrapper and FSDP1, possibly in the middle of a name.
_NAMES = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def not_selected(name: str, module: nn.Module, config: RMMConfig, heads: list[nn.Module]) -> str | None:
    if config.target_modules == "all-linear":
        if any(module is head for head in heads):
            return "the output head"
    elif not matches(config.target_modules, name):
        return "not in target_modules"
    if config.exclude_modules is not None and matches(config.exclude_modules, name):
        return "in exclude_modules"
    return None


def nearest(pattern: str, names: Sequence[str]) -> str:

    def similarity(name: str) -> float:
        parts = name.split(".")
        tails = (".".join(parts[i:]) for i in range(len(parts)))
        return max(difflib.SequenceMatcher(None, pattern, tail).ratio() for tail in tails)

    return ", ".join(sorted(names, key=similarity, reverse=True)[:3])


def output_heads(model: nn.Module) -> list[nn.Module]:
    """Find the layers that compute logits over the vocabulary, by ``get_output_embeddings`` of every submodule.

    Some models return an embedding: that means the layer that shares its weight, or one of the same shape.
    """
    heads: list[nn.Module] = []
    for module in model.modules():
        get = getattr(module, "get_output_embeddings", None)
        if callable(get):
            try:
                head = get()
            except (AttributeError, NotImplementedError):
                continue
            if isinstance(head, nn.Embedding):
                heads += _layers_of(head, module)
            elif isinstance(head, nn.Module):
                heads.append(head)
    return heads


def _layers_of(embedding: nn.Embedding, model: nn.Module) -> list[nn.Linear]:
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    shape = embedding.num_embeddings, embedding.embedding_dim
    tied = [layer for layer in layers if layer._parameters.get("weight") is embedding._parameters["weight"]]
    return tied or [layer for layer in layers if (layer.out_features, layer.in_features) == shape]


def is_conv1d(module: nn.Module) -> bool:
    """Say whether a module is GPT-2's Conv1D itself, without importing transformers."""
    transformers = sys.modules.get("transformers.pytorch_utils")
    return transformers is not None and type(module) is transformers.Conv1D


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of torch.compile, DataParallel and DistributedDataParallel.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> unwrapped(nn.DataParallel(model)) is model
        True
    """
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif (inner := model._modules.get("_orig_mod")) is not None:
            model = inner
        else:
            return model


def own_name(name: str) -> str:
    """Return the name that a module would have if no part of the model were wrapped.

    Example:
        >>> own_name("encoder.0._orig_mod.dense")
        'encoder.0.dense'
    """
    return ".".join(part for part in name.split(".") if part not in _NAMES)


def first_names(model: nn.Module) -> dict[nn.Module, str]:
    """Map every submodule but the model itself to the first of its names."""
    return {module: name for name, module in model.named_modules() if name}


_OPERATIONS = {
    "bits": ("linear", "experts", "convolution"),
    "min_rows": ("linear", "convolution"),
    "activation_bits": ("activation", "experts"),
    "norm_bits": ("norm",),
    "attention_bits": ("attention",),
    "fused": ("activation", "norm", "dropout"),
}
_ANY = ("mask_padding", "checkpointed")  # all other fields are those of sketches alone


def check_overrides(config: RMMConfig, operations: Mapping[str, str]) -> None:
    """Check that every field of every override changes a module that is to be converted."""
    for pattern, changes in config.overrides.items():
        single = dataclasses.replace(config, overrides={pattern: {}})
        found = {operations[name] for name in operations if single.override_pattern(name)}
        if not found:
            raise ValueError(
                f"overrides[{pattern!r}] must match a converted module, and matches none. "
                f"The nearest are {nearest(pattern, list(operations))}."
            )
        for field in changes:
            if not _changes(field, found):
                wanted = " or ".join(map(repr, _operations(field)))
                raise ValueError(
                    f"overrides[{pattern!r}] changes {field}, which is a setting of the operation {wanted}, and "
                    f"matches modules of the operation {', '.join(sorted(found))} alone. "
                    f"Give a setting of theirs, or a pattern that matches others."
                )


def restricted(config: RMMConfig, operations: Mapping[str, str], names: Iterable[str] = ()) -> RMMConfig:
    """Return a configuration that selects given modules without an example, and no others of several names."""
    linears = [name for name, operation in operations.items() if operation == "linear"]
    overrides = {}
    for pattern, changes in config.overrides.items():
        found = {operations[name] for name in operations if config.override_pattern(name) == pattern}
        if found:  # kept without fields too, as patterns after it would match its modules
            overrides[pattern] = {field: value for field, value in changes.items() if _changes(field, found)}
    if not linears:
        others = [name for name in config.operations if name != "linear"]
        return config.replace(operations=others, overrides=overrides)
    return config.replace(target_modules=entries_for(linears, names), overrides=overrides)


def _changes(field: str, operations: set[str]) -> bool:
    return field in _ANY or not operations.isdisjoint(_operations(field))


def _operations(field: str) -> tuple[str, ...]:
    return _OPERATIONS.get(field, ("linear",))
