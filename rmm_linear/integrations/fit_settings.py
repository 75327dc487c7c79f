"""Read the settings of a fit: ``fit=`` of a callback, and the flags of commands."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rmm_linear._support.progress import check_progress
from rmm_linear._support.validation import check_integer, did_you_mean
from rmm_linear.context.checkpointing import REPLACE, check_checkpointing
from rmm_linear.planning.budget import read_budget

SETTINGS = (
    "memory",
    "max_noise",
    "allow",
    "time",
    "objective",
    "folder",
    "host_memory",
    "bandwidth",
    "length",
    "progress",
    "checkpointing",
)


def read_fit(fit: object) -> dict[str, Any]:
    """Read what a user gave as ``fit``: a budget as :func:`rmm_linear.fit` takes it, or a mapping of its arguments.

    In addition, a mapping may have the length of the longest sequence that will come.

    Example:
        >>> read_fit("8GB"), read_fit({"memory": 0.5, "max_noise": 0.1})
        ({'memory': '8GB'}, {'memory': 0.5, 'max_noise': 0.1})
    """
    if isinstance(fit, bool) or not isinstance(fit, str | int | float | Mapping):
        raise TypeError(
            f'fit must be a budget such as "8GB", or a dictionary such as {{"memory": "8GB", "max_noise": 0.5}}, '
            f"got {fit!r}."
        )
    settings: dict[str, Any] = dict(fit) if isinstance(fit, Mapping) else {"memory": fit}
    for name in settings:
        if name not in SETTINGS:
            near = did_you_mean(str(name), SETTINGS)
            raise ValueError(f"fit must have keys of {', '.join(SETTINGS)}, got {name!r}.{near}")
    memory = settings.get("memory")
    if memory is None and settings.get("time") is None:
        raise ValueError(f'fit must have "memory" or "time", got {fit!r}. Use fit="8GB".')
    if memory is not None:
        read_budget(memory, 10**9)
    check_integer("length", settings.get("length"), optional=True)
    check_progress(settings.get("progress"))
    check_checkpointing(settings.get("checkpointing", REPLACE))
    return settings


def as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON holds them, to be compared with those of an earlier run."""
    compared = {name: value for name, value in settings.items() if name != "progress"}
    return {
        name: sorted(map(str, value)) if isinstance(value, Collection) and not isinstance(value, str) else value
        for name, value in compared.items()
    }
