"""rmm_linear: transformers that save a tenth of what their backward pass needs, at random and without bias.

import rmm_linear
print(rmm_linear.convert(model, ratio=0.1))   # train as before
"""

from rmm_linear._version import __version__
from rmm_linear.config import RMMConfig
from rmm_linear.conversion.convert import convert
from rmm_linear.conversion.report import ConversionReport, ConvertedLayer, PackedEntry
from rmm_linear.conversion.revert import revert
from rmm_linear.conversion.state import (
    load_sketch_state,
    read_sketch_state,
    save_sketch_state,
    sketch_state,
    sketch_tensors,
)
from rmm_linear.layers.functional import sketched_linear
from rmm_linear.layers.linear import RMMLinear

__all__ = [
    "ConversionReport",
    "ConvertedLayer",
    "PackedEntry",
    "RMMConfig",
    "RMMLinear",
    "__version__",
    "convert",
    "load_sketch_state",
    "read_sketch_state",
    "revert",
    "save_sketch_state",
    "sketch_state",
    "sketch_tensors",
    "sketched_linear",
]
