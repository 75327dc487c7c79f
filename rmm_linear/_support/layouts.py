"""Tell tensors that are a grid of numbers from others."""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Say whether a tensor has rows that can be coded: it is neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested
