"""rmm_linear: fine-tune transformers in less memory, with random, unbiased gradients.

import rmm_linear
print(rmm_linear.convert(model, ratio=0.1))   # train as before
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rmm_linear._support.provided import provide
from rmm_linear._version import __version__

if TYPE_CHECKING:
    from rmm_linear.config import RMMConfig
    from rmm_linear.conversion.convert import convert
    from rmm_linear.conversion.exact import revert
    from rmm_linear.conversion.report import ConversionReport, ConvertedLayer, PackedEntry
    from rmm_linear.conversion.state import (
        load_sketch_state,
        read_sketch_state,
        save_sketch_state,
        sketch_state,
        sketch_tensors,
    )
    from rmm_linear.fitting.fit import fit
    from rmm_linear.fitting.largest import LargestBatch, max_batch
    from rmm_linear.fitting.longest import LongestSequence, max_length
    from rmm_linear.fitting.report import FitReport
    from rmm_linear.integrations.diagnosis import Diagnosis
    from rmm_linear.integrations.doctor import doctor
    from rmm_linear.layers.function import sketched_linear
    from rmm_linear.layers.linear import RMMLinear
    from rmm_linear.planning.step.shards import Shards
    from rmm_linear.planning.tiles.apply import TileReport, tile

__all__ = [
    "ConversionReport",
    "ConvertedLayer",
    "Diagnosis",
    "FitReport",
    "LargestBatch",
    "LongestSequence",
    "PackedEntry",
    "RMMConfig",
    "RMMLinear",
    "Shards",
    "TileReport",
    "__version__",
    "convert",
    "doctor",
    "fit",
    "load_sketch_state",
    "max_batch",
    "max_length",
    "read_sketch_state",
    "revert",
    "save_sketch_state",
    "sketch_state",
    "sketch_tensors",
    "sketched_linear",
    "tile",
]

# Imported on first access, so that a command prints its help without waiting for PyTorch.
_MODULES = {
    "ConversionReport": "conversion.report",
    "ConvertedLayer": "conversion.report",
    "Diagnosis": "integrations.diagnosis",
    "FitReport": "fitting.report",
    "LargestBatch": "fitting.largest",
    "LongestSequence": "fitting.longest",
    "PackedEntry": "conversion.report",
    "RMMConfig": "config",
    "RMMLinear": "layers.linear",
    "Shards": "planning.step.shards",
    "TileReport": "planning.tiles.apply",
    "convert": "conversion.convert",
    "doctor": "integrations.doctor",
    "fit": "fitting.fit",
    "load_sketch_state": "conversion.state",
    "max_batch": "fitting.largest",
    "max_length": "fitting.longest",
    "read_sketch_state": "conversion.state",
    "revert": "conversion.exact",
    "save_sketch_state": "conversion.state",
    "sketch_state": "conversion.state",
    "sketch_tensors": "conversion.state",
    "sketched_linear": "layers.function",
    "tile": "planning.tiles.apply",
    "RMMTrainer": "integrations.rmm_trainer",  # needs transformers, so it is none of the names that * imports
}
# Planning applies plans with conversions, and is below them.
provide("convert", "rmm_linear.fitting.executor", "Conversion")
# Transformers asks a configuration for the name of its method, and looks it up in a registry.
provide("quantizer", "rmm_linear.integrations.quantizer", "RMMQuantizer")
_FOLDERS = ("estimators", "integrations", "losses", "memory", "ops", "planning", "variance")


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_FOLDERS})
