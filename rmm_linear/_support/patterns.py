"""Match the names of modules with patterns by PEFT's rule, in bounded time.

Python tries the ways of a pattern one after another until one matches, and a repeated group has exponentially many:
``(a+)+$`` takes seconds for one name of 25 letters that it does not match. Patterns come from files too, so they are
refused if a name could take more than a few million ways, in all of a configuration's patterns together. Repetitions of
single characters, whose lengths add up to at most the name's, have (L + s choose s) of them for s repetitions and L
characters; alternatives and what is optional multiply them.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

if sys.version_info >= (3, 11):
    from re import _parser as parser  # pyright: ignore[reportAttributeAccessIssue]
else:
    import sre_parse as parser

MOST_CHARACTERS = 2**18  # of a pattern: fit names the modules of a model of 80 layers with adapters in one
_MOST_WAYS = 3_000_000  # 50 ms for a name
_WHOLE = "^"  # begins an entry of a list that is a regular expression
_LENGTH = 64  # of a name
_FEW = 8  # lengths of a repetition that count as alternatives
_ONE_CHARACTER = {"LITERAL", "NOT_LITERAL", "ANY", "IN"}


def matches(patterns: str | Sequence[str], name: str) -> bool:
    """Say whether a dotted name matches a regular expression as a whole, or an entry of a list.

    That is a name or a dotted suffix, or, if it begins with ^, a regular expression.

    Example:
        >>> matches(["query"], "layer.0.query"), matches(["query"], "layer.0.subquery")
        (True, False)
        >>> matches(["^query"], "layer.0.query"), matches(["^query"], "query")
        (False, True)
    """
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(
        re.fullmatch(entry, name) is not None
        if entry.startswith(_WHOLE)
        else name == entry or name.endswith(f".{entry}")
        for entry in patterns
    )


def expressions_in(patterns: str | Sequence[str]) -> list[str]:
    """Return the regular expressions of what :func:`matches` takes."""
    return [patterns] if isinstance(patterns, str) else [entry for entry in patterns if entry.startswith(_WHOLE)]


def expressions_for(names: Iterable[str]) -> Iterator[str]:
    r"""Make entries of a list that match names alone, as few as their length allows.

    Example:
        >>> list(expressions_for(["a", "b.c"]))
        ['^(?:a|b\\.c)']
    """
    joined = ""
    for name in map(re.escape, names):
        if joined and len(joined) + len(name) + len("^(?:|)") > MOST_CHARACTERS:
            yield f"^(?:{joined})"
            joined = ""
        joined += f"|{name}" if joined else name
    if joined:
        yield f"^(?:{joined})"


def entries_for(chosen: Collection[str], names: Iterable[str]) -> list[str]:
    r"""Make entries of a list that match some of several names, and no other: patterns where others end in them.

    Example:
        >>> entries_for(["a", "b.c"], ["a", "b.c", "d.a", "e"])
        ['b.c', '^(?:a)']
    """
    wanted = set(chosen)
    others = [name for name in names if name not in wanted]
    suffixes = {name[at + 1 :] for name in others for at, letter in enumerate(name) if letter == "."}
    return [
        *(name for name in chosen if name not in suffixes),
        *expressions_for(name for name in chosen if name in suffixes),
    ]


def check_patterns(patterns: Iterable[str]) -> None:
    """Raise unless regular expressions, each of which :func:`check_pattern` accepts, take a bounded time together."""
    several = list(patterns)
    if sum(map(_ways_of, several)) > _MOST_WAYS:
        worst = max(several, key=_ways_of)
        raise ValueError(
            f"target_modules, exclude_modules and overrides must match every name in bounded time together, got "
            f"{len(several)} patterns of which {worst!r} takes longest. Repeat fewer characters, or give names."
        )


@functools.lru_cache(maxsize=4096)
def _ways_of(pattern: str) -> float:
    alternatives, repetitions = _ways(parser.parse(pattern))
    return alternatives * _lengths(repetitions)


def check_pattern(name: str, pattern: object) -> None:
    r"""Raise unless a value is a regular expression that takes a bounded time for every name.

    Example:
        >>> check_pattern("target_modules", r".*\.layers\.\d+\..*(q|k|v)_proj")
        >>> check_pattern("target_modules", "(a+)+$")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: target_modules must match every name in bounded time, got '(a+)+$'. Repeat single characters only...
    """
    if not isinstance(pattern, str):
        raise TypeError(f"{name} must be made of strings, got {pattern!r}.")
    if len(pattern) > MOST_CHARACTERS:
        raise ValueError(
            f"{name} must have patterns of at most {MOST_CHARACTERS} characters, got one of {len(pattern)} that begins "
            f"with {pattern[:40]!r}. Give a list of names."
        )
    try:
        re.compile(pattern)
        ways = _ways_of(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{name} must be a valid regular expression, got {pattern!r} ({error}).") from None
    if ways > _MOST_WAYS:
        raise ValueError(
            f"{name} must match every name in bounded time, got {pattern!r}. Repeat single characters only, "
            "as .* does, at most four times, no groups, and refer to none; or give names."
        )


def _lengths(repetitions: int) -> int:
    return math.comb(_LENGTH + repetitions, repetitions)


def _ways(items: Any) -> tuple[float, int]:
    """Count the ways of a part of a pattern: alternatives, infinite where nothing bounds them, and repetitions."""
    alternatives, repetitions = 1.0, 0
    for operator, value in items:
        kind = str(operator)
        if kind in _ONE_CHARACTER or kind == "AT":
            continue
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            few, many = _ways_of_repeat(*value)
        elif kind == "SUBPATTERN":
            few, many = _ways(value[-1])
        elif kind == "BRANCH":
            parts = [_ways(each) for each in value[1]]
            few, many = sum(part[0] for part in parts), max(part[1] for part in parts)
        elif kind in ("ASSERT", "ASSERT_NOT"):
            few, many = _ways(value[-1])
            few, many = few * _lengths(many), 0
        else:  # references to groups, and what later versions add
            few, many = math.inf, 0
        alternatives, repetitions = alternatives * few, repetitions + many
    return alternatives, repetitions


def _ways_of_repeat(least: Any, most: Any, items: Any) -> tuple[float, int]:
    least, most = int(least), int(most)
    if len(items) == 1 and str(items[0][0]) in _ONE_CHARACTER:
        return (most - least + 1, 0) if most - least < _FEW else (1, 1)
    few, many = _ways(items)
    if most <= 1:
        return few + 1 - least, many
    return math.inf, 0
