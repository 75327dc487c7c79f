"""Storage of a matrix in 8, 4 or 2 bits per element, unbiased, in plain PyTorch."""

from rmm_linear.packing.pack import (
    check_bits,
    empty_packed,
    mark_infinite,
    pack,
    pack_parts,
    packed_bytes,
    rounding_variance,
    row_parts,
    unpack,
    unpack_parts,
    unrotate,
)
from rmm_linear.packing.rounding import GROUP, ROUNDING_STREAM, WIDTHS, RoundingNoise

__all__ = [
    "GROUP",
    "ROUNDING_STREAM",
    "WIDTHS",
    "RoundingNoise",
    "check_bits",
    "empty_packed",
    "mark_infinite",
    "pack",
    "pack_parts",
    "packed_bytes",
    "rounding_variance",
    "row_parts",
    "unpack",
    "unpack_parts",
    "unrotate",
]
