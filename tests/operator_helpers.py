"""What the tests of the operators share: inputs, token masks, and the operators' arguments."""

from __future__ import annotations

import torch

from rmm_linear.ops.sketches import to_arguments
from rmm_linear.sketches import FAMILIES, TokenMask
from rmm_linear.spec import SaveSpec

SEED = torch.tensor([77])
SKETCH = torch.ops.rmm_linear.sketch.default
DENSE_BLOCKS = [("gaussian", 9), ("rademacher", 9), ("hadamard", 9)]
BLOCKS = [(kind, None) for kind in FAMILIES] + DENSE_BLOCKS


def made(tokens=40, columns=70, dtype=torch.float32):
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def ranks(name, tokens=40):
    return None if name == "all" else TokenMask.of(torch.arange(tokens) % (3 if name == "some" else 16) == 1)


def how(kind, rows, block=None, bits=None, mask="all"):
    """Arguments of the operators."""
    return to_arguments(SaveSpec(kind, rows, block, bits), ranks(mask))
