"""One command line flag per field of RMMConfig, made from the dataclass, and the way back to a config."""

from __future__ import annotations

import argparse
import dataclasses
import re
import typing
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from glue_finetune.errors import UserError, one_line
from rmm_linear import RMMConfig
from rmm_linear._support.validation import did_you_mean
from rmm_linear.norm_estimators.registry import NONE
from rmm_linear.sketches import KINDS

EXACT = "exact"  # the kind that converts nothing
_NAMES = ("target_modules", "exclude_modules")
_LISTS = ("operations", *_NAMES)
# All but the mapping that only a file can hold.
_FIELDS = {field.name: field for field in dataclasses.fields(RMMConfig) if field.name != "overrides"}
_WORDS = {"none": None, "true": True, "false": False}


def add_sketch_flags(parser: argparse.ArgumentParser) -> None:
    """Add --rmm_config and one flag for each field of RMMConfig but `overrides`."""
    group = parser.add_argument_group("sketch (rmm_linear.RMMConfig)")
    group.add_argument(
        "--rmm_config",
        "--rmm-config",
        metavar="FILE",
        help="A configuration saved by RMMConfig.save. Flags of this group override its fields.",
    )
    defaults, hints = RMMConfig(), typing.get_type_hints(RMMConfig)
    for name, field in _FIELDS.items():
        # What is wrong with a value, RMMConfig says.
        form: Any = (
            {"nargs": "+", "metavar": "NAME"} if name in _LISTS else {"type": str if hints[name] is str else _value}
        )
        baseline = f" Or {EXACT}, the unchanged baseline." if name == "kind" else ""
        group.add_argument(
            *dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")),
            default=getattr(defaults, name),
            help=field.metadata["help"] + baseline,
            **form,
        )


def build_config(values: dict[str, Any], given: Collection[str]) -> tuple[RMMConfig, bool]:
    """Make the configuration that parsed flags describe: the file of --rmm_config, changed by the flags beside it.

    Args:
        values: Name of each flag to its value.
        given: Names of the flags that the user gave; the others leave the file's or RMMConfig's own value.

    Returns:
        The configuration, and whether the kind is exact: then nothing is converted, and the kind is that of the file.

    Raises:
        UserError: If the file cannot be read, or a value is outside its range.
    """
    changes = {name: _names(values[name]) if name in _NAMES else values[name] for name in _FIELDS if name in given}
    kind = changes.get("kind")
    if kind is not None and kind not in (EXACT, *KINDS):
        near = did_you_mean(kind, (EXACT, *KINDS))
        raise UserError(f"kind must be one of {EXACT}, {', '.join(KINDS)}, got {kind!r}.{near}")
    if kind == EXACT:
        del changes["kind"]  # the other flags are checked all the same
    base = RMMConfig() if values["rmm_config"] is None else _load(Path(values["rmm_config"]).expanduser())
    try:
        return base.replace(**changes), kind == EXACT
    except (ValueError, TypeError) as error:
        raise UserError(one_line(error)) from error


def sketch_flags(given: Collection[str]) -> list[str]:
    """Return the flags of the sketch among those that the user gave."""
    return sorted({"rmm_config", *_FIELDS} & {*given})


def has_estimators(config: RMMConfig) -> bool:
    """Return whether the configuration or one of its overrides names a norm estimator."""
    fields = ({"norm_estimator": config.norm_estimator}, *config.overrides.values())
    return any(changes.get("norm_estimator", NONE) != NONE for changes in fields)


def _load(path: Path) -> RMMConfig:
    try:
        return RMMConfig.load(path)
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise UserError(f"rmm_config must be a file written by RMMConfig.save; {path}: {reason}") from error


def _value(text: str) -> Any:
    """Read a flag's value: a number, true, false or none where it is one, else the text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def _names(value: list[str]) -> str | list[str]:
    """The words after --target_modules as RMMConfig takes them: a list of names, or a string for anything else."""
    is_name = re.fullmatch(r"[\w.]+", value[0]) and value[0] != "all-linear"
    return value if len(value) > 1 or is_name else value[0]
