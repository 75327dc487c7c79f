"""One command line flag per field of RMMConfig, made from the dataclass, and the way back to a config."""

from __future__ import annotations

import argparse
import dataclasses
import re
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from glue_finetune.errors import UserError, one_line
from rmm_linear import RMMConfig
from rmm_linear.estimators import norm_estimators
from rmm_linear.norm_estimators.registry import NONE
from rmm_linear.sketches import KINDS

EXACT = "exact"  # the kind that converts nothing
_OVERRIDES = "overrides"  # a mapping: only a file can hold it
_NAMES = ("target_modules", "exclude_modules")
_HELP = {
    "kind": f"Family of the sketch, {EXACT} for the unchanged baseline: {EXACT}, {', '.join(KINDS)}.",
    "ratio": "Rows kept by rows seen, in (0, 1].",
    "memory": "Bytes kept by bytes of the input, in (0, 1]; instead of ratio.",
    "bits": "Bits per stored element: 8, 4, 2, none for the dtype itself, or auto.",
    "block": "Tokens per block of a block-diagonal gaussian, rademacher or hadamard sketch. Default: one block.",
    "uniform_mix": "For norm_rows and wta: part of the probability that all tokens share alike, in (0, 1].",
    "norm_estimator": "For norm_rows and wta: what the size of a token's gradient is expected from: "
    + ", ".join(norm_estimators())
    + ".",
    "min_rows": "Rows that are kept at least, so that heads which see one row per sequence stay exact.",
    "mask_padding": "Whether padding is left out of the sketch: true or false.",
    "target_modules": "Layers to convert: all-linear, names (exact or dotted suffixes), or one regular expression.",
    "exclude_modules": "Layers to leave alone: names or one regular expression.",
}


def add_sketch_flags(parser: argparse.ArgumentParser) -> None:
    """Add --rmm_config and one flag for each field of RMMConfig but `overrides`.

    Args:
        parser: The parser to add to.
    """
    group = parser.add_argument_group("sketch (rmm_linear.RMMConfig)")
    group.add_argument(
        "--rmm_config",
        "--rmm-config",
        metavar="FILE",
        help="A configuration saved by RMMConfig.save. Flags of this group override its fields.",
    )
    defaults = RMMConfig()
    hints = typing.get_type_hints(RMMConfig)
    for name in _flag_names():
        options: dict[str, Any] = {
            "default": getattr(defaults, name),
            "help": _HELP.get(name, f"The field {name} of rmm_linear.RMMConfig."),
        }
        if name in _NAMES:
            options.update(nargs="+", metavar="NAME")
        else:
            options.update(type=_reader(name, hints[name]))
        group.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), dest=name, **options)


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
    changes = {
        name: _names(values[name]) if name in _NAMES else values[name] for name in _flag_names() if name in given
    }
    kind = changes.get("kind")
    if kind is not None and kind not in (EXACT, *KINDS):
        raise UserError(f"kind must be one of {EXACT}, {', '.join(KINDS)}, got {kind!r}.")
    if kind == EXACT:
        del changes["kind"]  # the other flags are checked all the same
    base = RMMConfig() if values["rmm_config"] is None else _load(Path(values["rmm_config"]).expanduser())
    try:
        return base.replace(**changes), kind == EXACT
    except (ValueError, TypeError) as error:
        raise UserError(one_line(error)) from error


def has_estimators(config: RMMConfig) -> bool:
    """Say whether some layer has a norm estimator.

    Args:
        config: The configuration.

    Returns:
        True if it or one of its overrides names one.
    """
    fields = ({"norm_estimator": config.norm_estimator}, *config.overrides.values())
    return any(changes.get("norm_estimator", NONE) != NONE for changes in fields)


def _load(path: Path) -> RMMConfig:
    try:
        return RMMConfig.load(path)
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise UserError(f"rmm_config must be a file written by RMMConfig.save; {path}: {reason}") from error


def _flag_names() -> list[str]:
    return [field.name for field in dataclasses.fields(RMMConfig) if field.name != _OVERRIDES]


def _reader(name: str, hint: Any) -> Callable[[str], Any]:
    """The function that reads a field's value from text: for ``int | str | None`` a number, "none", or the text."""
    members = typing.get_args(hint) or (hint,)

    def read(text: str) -> Any:
        if type(None) in members and text.lower() == "none":
            return None
        if bool in members and text.lower() in ("true", "false"):
            return text.lower() == "true"
        for number in (int, float):
            if number in members:
                try:
                    return number(text)
                except ValueError:
                    continue
        if str in members:
            return text
        wanted = " or ".join("none" if member is type(None) else member.__name__ for member in members)
        raise argparse.ArgumentTypeError(f"{name} must be {wanted}, got {text!r}")

    return read


def _names(value: list[str]) -> str | list[str]:
    """The words after --target_modules as RMMConfig takes them: a list of names, or a string for anything else."""
    is_name = re.fullmatch(r"[\w.]+", value[0]) and value[0] != "all-linear"
    return value if len(value) > 1 or is_name else value[0]
