"""Where memory goes: bytes saved for the backward pass per module, peak memory, what a conversion would change."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rmm_linear.memory.ledger import Ledger, track_saved
from rmm_linear.memory.peak import Peak, peak

if TYPE_CHECKING:
    from rmm_linear.conversion.explain import Explanation, Keeper, LayerMemory, OperationMemory, explain

# These live in conversion, which imports this folder, so they are imported on first access.
_FROM_CONVERSION = ("Explanation", "Keeper", "LayerMemory", "OperationMemory", "explain")

__all__ = [
    "Explanation",
    "Keeper",
    "LayerMemory",
    "Ledger",
    "OperationMemory",
    "Peak",
    "explain",
    "peak",
    "track_saved",
]


def __getattr__(name: str) -> Any:
    if name not in _FROM_CONVERSION:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("rmm_linear.conversion.explain"), name)
