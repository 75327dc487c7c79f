"""Triton kernels for random sketches and their storage in few bits."""

from .dense_sketch import dense_sketch
from .gated import apply_gated, pack_gated
from .masks import apply_mask, pack_mask
from .packing import pack, unpack, unrotate
from .random_keys import random_keys
from .row_norms import row_norms
from .sparse_sketch import sparse_sketch

__all__ = [
    "apply_gated",
    "apply_mask",
    "dense_sketch",
    "pack",
    "pack_gated",
    "pack_mask",
    "random_keys",
    "row_norms",
    "sparse_sketch",
    "unpack",
    "unrotate",
]
