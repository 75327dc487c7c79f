"""What the overrides of a configuration change in a model: each field of each pattern must change something."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rmm_linear.config import RMMConfig
from rmm_linear.conversion.names import nearest

_OPERATIONS = {
    "activation_bits": ("activation",),
    "norm_bits": ("norm",),
    "attention_bits": ("attention",),
    "fused": ("activation", "norm"),
}
_ANY = ("mask_padding", "checkpointed")  # all other fields are those of sketches


def check_overrides(config: RMMConfig, operations: Mapping[str, str]) -> None:
    """Check that every field of every override changes a converted module.

    Args:
        config: The configuration.
        operations: Name of each module that is to be converted, to its operation.

    Raises:
        ValueError: If a pattern matches none of them, or none of an operation that has the field.
    """
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


def restricted(config: RMMConfig, operations: Mapping[str, str]) -> RMMConfig:
    """Return a configuration that selects given modules without an example.

    Args:
        config: A configuration that selects these, and linear layers besides.
        operations: Name of each module to be converted, to its operation.

    Returns:
        The configuration, without what overrides change in others.
    """
    linears = [name for name, operation in operations.items() if operation == "linear"]
    overrides = {}
    for pattern, changes in config.overrides.items():
        found = {operations[name] for name in operations if config.override_pattern(name) == pattern}
        if found:  # kept without fields too, as patterns after it would match its modules
            overrides[pattern] = {field: value for field, value in changes.items() if _changes(field, found)}
    if not linears:
        others = [name for name in config.operations if name != "linear"]
        return config.replace(operations=others, overrides=overrides)
    return config.replace(target_modules=linears, overrides=overrides)


def _changes(field: str, operations: set[str]) -> bool:
    return field in _ANY or not operations.isdisjoint(_operations(field))


def _operations(field: str) -> tuple[str, ...]:
    return _OPERATIONS.get(field, ("linear",))
