"""One command line flag per field of RMMConfig, made from the dataclass, and the way back to a config."""

from __future__ import annotations

import argparse
import dataclasses
import re
import types
import typing
from pathlib import Path
from typing import Any

from glue_finetune.errors import UserError, one_line
from rmm_linear import RMMConfig
from rmm_linear.sketches import KINDS

EXACT = "exact"  # the kind that converts nothing
_OVERRIDES = "overrides"  # a mapping: only a file can hold it
_NAMES = ("target_modules", "exclude_modules")
_HELP = {
    "kind": f"Family of the sketch, {EXACT} for the unchanged baseline: {EXACT}, {', '.join(KINDS)}.",
    "ratio": "Rows kept by rows seen, in (0, 1].",
    "block": "Tokens per block of a block-diagonal gaussian or rademacher sketch. Default: one block.",
    "min_rows": "Rows that are kept at least, so that heads which see one row per sequence stay exact.",
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
    hints = typing.get_type_hints(RMMConfig)
    for field in dataclasses.fields(RMMConfig):
        if field.name == _OVERRIDES:
            continue
        options: dict[str, Any] = {
            "default": _default(field),
            "help": _HELP.get(field.name, "See rmm_linear.RMMConfig."),
        }
        if field.name in _NAMES:
            options.update(nargs="+", metavar="NAME")
        else:
            options.update(type=_parser_of(hints[field.name]))
        group.add_argument(*dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}")), **options)


def sketch_defaults(path: Path) -> dict[str, Any]:
    """Read a saved RMMConfig as defaults for the flags.

    Args:
        path: File written by ``RMMConfig.save``.

    Returns:
        Name of each field to its value, `overrides` among them.

    Raises:
        UserError: If the file cannot be read or holds no valid configuration.
    """
    try:
        config = RMMConfig.load(path)
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise UserError(f"rmm_config must be a file written by RMMConfig.save; {path}: {reason}") from error
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(RMMConfig)}


def build_config(values: dict[str, Any]) -> RMMConfig | None:
    """Make the configuration that parsed flags describe.

    Args:
        values: Name of each flag to its value.

    Returns:
        The configuration; None for the exact baseline.

    Raises:
        UserError: If a value is outside its range.
    """
    fields = {field.name: values[field.name] for field in dataclasses.fields(RMMConfig) if field.name in values}
    fields.update({name: _names(fields[name]) for name in _NAMES})
    kind = fields["kind"]
    if kind not in (EXACT, *KINDS):
        raise UserError(f"kind must be one of {EXACT}, {', '.join(KINDS)}, got {kind!r}.")
    if kind == EXACT:
        del fields["kind"]  # the other fields are checked all the same
    try:
        config = RMMConfig(**fields)
    except (ValueError, TypeError) as error:
        raise UserError(one_line(error)) from error
    return None if kind == EXACT else config


def _default(field: dataclasses.Field) -> Any:
    return field.default_factory() if field.default is dataclasses.MISSING else field.default  # pyright: ignore


def _parser_of(hint: Any) -> Any:
    """The function that reads a field's value: int for ``int | None``, and so on."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        hint = type(typing.get_args(hint)[0])
    return _read_bool if hint is bool else hint


def _read_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"the value must be true or false, got {text!r}")
    return text.lower() == "true"


def _names(value: Any) -> Any:
    """What was typed after --target_modules as RMMConfig takes it: a string is a regular expression, a list is names."""
    if not isinstance(value, list) or len(value) > 1:
        return value
    text = value[0]
    return text if text == "all-linear" or not re.fullmatch(r"[\w.]+", text) else value
