"""Checks of a configuration's fields; their errors name the rule, the value received and the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from rmm_linear._support.patterns import check_pattern, expressions_in

_LONGEST_WORD = 100  # the comparison takes the square of it


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return a sentence with the known word that is most like another one, or nothing."""
    near = difflib.get_close_matches(str(word)[:_LONGEST_WORD], list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def check_fraction(name: str, value: object, hint: str, *, needed: bool = False) -> None:
    """Raise unless a value is a number in (0, 1], or None if it is not ``needed``."""
    if value is None and not needed:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number in (0, 1], got {value!r}. {hint}")
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {value}. {hint}")


def check_integer(name: str, value: object, *, optional: bool = False, least: int = 1) -> None:
    """Raise unless a value is an integer of at least ``least``, or None if it is ``optional``."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        rule = "a positive integer" if least == 1 else "an integer"
        raise TypeError(f"{name} must be {rule}{' or None' if optional else ''}, got {value!r}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")


def read_names(name: str, value: object) -> str | tuple[str, ...]:
    """Return a regular expression, or a list of names as a tuple; raise for anything else."""
    if isinstance(value, str):
        check_pattern(name, value)
        return value
    if isinstance(value, Sequence | set | frozenset) and all(isinstance(entry, str) for entry in value):
        if not value:
            raise ValueError(f"{name} must name at least one layer, got an empty list.")
        for pattern in expressions_in(value := tuple(value)):
            check_pattern(name, pattern)
        return value
    raise TypeError(f"{name} must be a regular expression or a list of layer names, got {value!r}.")


def is_newer_version(version: object, than: str) -> bool:
    """Say whether a version, as found in a file, is a string that is newer than another one."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", text)[:3]]

    return isinstance(version, str) and numbers(version) > numbers(than)
