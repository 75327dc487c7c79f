"""Triton kernels for random sketches and their storage in few bits."""

from .activate import activate_and_pack, square_and_pack
from .channels import channel_gradients, pack_channels
from .dense_sketch import dense_sketch
from .derivatives import apply_derivative, pack_derivative
from .dropout import dropout
from .gated import apply_gated, gate_and_pack, pack_gated
from .masks import apply_mask, pack_mask
from .normal import decode_normal, encode_normal
from .norms import norm_gradients, normalize_and_pack, pack_norm
from .packing import pack, unpack
from .pooling import max_pool, max_pool_backward
from .random_keys import random_keys
from .row_norms import row_norms
from .sparse_sketch import sparse_sketch

__all__ = [
    "activate_and_pack",
    "apply_derivative",
    "apply_gated",
    "apply_mask",
    "channel_gradients",
    "decode_normal",
    "dense_sketch",
    "dropout",
    "encode_normal",
    "gate_and_pack",
    "max_pool",
    "max_pool_backward",
    "norm_gradients",
    "normalize_and_pack",
    "pack",
    "pack_channels",
    "pack_derivative",
    "pack_gated",
    "pack_mask",
    "pack_norm",
    "random_keys",
    "row_norms",
    "sparse_sketch",
    "square_and_pack",
    "unpack",
]
