"""Make dataclasses of plain JSON types, checked against the types of their fields."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from rmm_linear._support.validation import did_you_mean

Read = TypeVar("Read")
_MOST = 2**63  # of whole numbers: bytes, steps
_hints = functools.cache(get_type_hints)


def read_fields(kind: type[Read], values: object, where: str = "") -> Read:
    """Make a dataclass of a mapping; raise ValueError if a field is missing, unknown, or of another type."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where or kind.__name__} must map field names to values, got {values!r}")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    place, hints = f"{where}." if where else "", _hints(kind)
    for name in values:
        if name not in fields:
            raise ValueError(f"{place}{name} is no field of {', '.join(fields)}.{did_you_mean(name, fields)}")
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{place}{name} is missing")
    return kind(**{name: _read(hints[name], value, f"{place}{name}") for name, value in values.items()})


def _read(hint: Any, value: Any, where: str) -> Any:
    for one in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        if dataclasses.is_dataclass(one) and isinstance(one, type):
            return read_fields(one, value, where)
        if get_origin(one) in (tuple, Sequence) and isinstance(value, list | tuple):
            return tuple(_read(get_args(one)[0], each, f"{where}[{place}]") for place, each in enumerate(value))
        if type(value) is int and abs(value) >= _MOST:
            continue
        if one is float and type(value) in (int, float) and math.isfinite(value):
            return value
        if one in (int, str, bool, NoneType) and type(value) is one:
            return value
    raise ValueError(f"{where} must be {getattr(hint, '__name__', None) or hint}, got {value!r}")


def check_least(one: Any, least: int, *names: str) -> None:
    """Raise ValueError if a field that is a number is too small; None passes."""
    for name in names:
        value = getattr(one, name)
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
