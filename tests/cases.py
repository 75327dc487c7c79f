"""Settings that several test files convert with, and cases that they run over."""

import sys

import pytest
from helpers import ALL_ARCHITECTURES

from rmm_linear import RMMConfig
from rmm_linear.sketches import KINDS, SAMPLERS, has_blocks

# Linear layers alone: all other gradients are exact. What stands in for other operations has tests of its own.
# Modules that a checkpoint recomputes are packed too; that they stay exact by default is tested by conversion/.
PACKED = {"checkpointed": "packed"}
LINEAR = {"operations": ("linear",), **PACKED}
QUARTER = {"ratio": 0.25, "min_rows": 1, **LINEAR}
ROUGH = {"kind": "countsketch", **QUARTER}
ROUGH_BODY = {**ROUGH, "min_rows": 8}  # a model's head stays exact: it sees one row per sequence, of which there are 4
WTA = {"kind": "wta", **QUARTER}
EXACT = {"ratio": 1.0, "min_rows": 1, **LINEAR}
# All operations. Attention alone is biased, by what its scores are off: 8 bits leave nothing that a z-test would see.
WHOLE = {"kind": "countsketch", "ratio": 0.25, "min_rows": 1, "attention_bits": 8, **PACKED}
WHOLE_BODY = {**WHOLE, "min_rows": 8}
CONFIG = RMMConfig(**ROUGH)

KIND_AND_BLOCK = [(kind, None) for kind in KINDS] + [(kind, 9) for kind in KINDS if has_blocks(kind)]


def light_and_heavy(light, heavy):
    """Numbers of draws."""
    return pytest.mark.parametrize("draws", [light, pytest.param(heavy, marks=pytest.mark.montecarlo)])


architectures = pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
every_sampler = pytest.mark.parametrize("kind", SAMPLERS)
every_width = pytest.mark.parametrize("bits", [None, 8, 4, 3, 2])
checkpoints = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
plain_or_checkpoints = pytest.mark.parametrize(
    "reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"]
)
preserve = pytest.mark.parametrize("preserve", [True, False], ids=["preserve", "no-preserve"])
needs_triton = pytest.mark.skipif(sys.platform != "linux", reason="Triton has no build for this platform")
