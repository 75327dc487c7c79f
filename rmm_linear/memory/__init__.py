"""Measure activation memory: bytes saved by each module, peaks, and what a conversion would change."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rmm_linear.memory.ledger import Ledger, track_saved
from rmm_linear.memory.peak import LiveTensor, Peak, peak

if TYPE_CHECKING:
    from rmm_linear.conversion.checkpointed import BlockMemory
    from rmm_linear.conversion.explain import explain
    from rmm_linear.conversion.explanation import Explanation, Keeper, LayerMemory, OperationMemory

# These live in conversion, which imports this folder, so they are imported on first access.
_FROM_CONVERSION = {
    "BlockMemory": "checkpointed",
    "Explanation": "explanation",
    "Keeper": "explanation",
    "LayerMemory": "explanation",
    "OperationMemory": "explanation",
    "explain": "explain",
}

__all__ = [
    "BlockMemory",
    "Explanation",
    "Keeper",
    "LayerMemory",
    "Ledger",
    "LiveTensor",
    "OperationMemory",
    "Peak",
    "explain",
    "peak",
    "track_saved",
]


def __getattr__(name: str) -> Any:
    if name not in _FROM_CONVERSION:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"rmm_linear.conversion.{_FROM_CONVERSION[name]}"), name)
