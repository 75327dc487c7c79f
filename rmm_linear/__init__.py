"""rmm_linear: linear layers that save a small unbiased sketch of their input for the backward pass.

import rmm_linear
print(rmm_linear.convert(model, ratio=0.1))   # train as before
"""

from rmm_linear._version import __version__
from rmm_linear.config import RMMConfig
from rmm_linear.conversion.convert import convert, revert
from rmm_linear.conversion.report import ConversionReport, ConvertedLayer
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
