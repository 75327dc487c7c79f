"""Leave out the modules that a function of the user's rejects, by their names, as a configuration can be saved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from inspect import signature
from typing import Any

from torch import nn

from rmm_linear._support.patterns import entries_for
from rmm_linear.config import RMMConfig

_RULE = "filter must be a function of a module and its name, in this order"
_SWAPPED = [(name, module) for name in ("name", "fqn", "n") for module in ("module", "m", "mod", "layer")]
Filter = Callable[[nn.Module, str], Any]


def check_filter(filter: object) -> None:
    """Check that ``filter`` is None or can be called."""
    if filter is not None and not callable(filter):
        raise TypeError(
            f"filter must be a function of a module and its name, got {filter!r}. "
            "Use target_modules or exclude_modules for names and patterns."
        )
    if filter is not None and _parameters(filter)[:2] in _SWAPPED:
        raise TypeError(f"{_RULE}, got one that takes {', '.join(_parameters(filter)[:2])}. Swap them.")


def _parameters(filter: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(signature(filter).parameters)
    except (TypeError, ValueError):  # of some built-in functions
        return ()


def _asked(filter: Filter, module: nn.Module, name: str) -> bool:
    try:
        return bool(filter(module, name))
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"{_RULE}, as filter=lambda module, name: ..., got one that raises {type(error).__name__} for {name!r}, "
            f"{type(module).__name__}: {error}."
        ) from error


def without_rejected(
    config: RMMConfig,
    filter: Filter,
    selected: Callable[[RMMConfig], Mapping[str, nn.Module]],
    names: Mapping[nn.Module, str],
) -> tuple[RMMConfig, set[str]]:
    """Exclude the modules that a filter rejects, and those inside of them that are selected then and rejected too."""
    answers: dict[str, bool] = {}
    narrowed, found = config, selected(config)
    while True:
        answers |= {name: _asked(filter, module, name) for name, module in found.items() if name not in answers}
        rejected = [name for name, answer in answers.items() if not answer]
        if all(answers[name] for name in found):
            break
        narrowed = config.replace(exclude_modules=_with_names(config.exclude_modules, rejected, names.values()))
        found = selected(narrowed)
    if answers and not found:
        raise ValueError(
            f"filter must accept a module that would be converted, and rejects all {len(answers)} "
            f"({', '.join(list(answers)[:3])}{', ...' if len(answers) > 3 else ''}). It is called as "
            "filter(module, name), and modules for which it returns False stay exact."
        )
    return narrowed, set(rejected)


def _with_names(given: str | Any | None, rejected: list[str], names: Collection[str]) -> list[str]:
    """Add names to ``exclude_modules``, as patterns where they would match other modules too."""
    before = ["^" + given] if isinstance(given, str) else [*(given or ())]
    return [*before, *entries_for(rejected, names)]
