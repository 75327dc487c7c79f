"""The C library: random numbers, CountSketch and packing on CPU, called with ctypes.

Built when the package is installed, if there is a C compiler; without it, and with RMM_BACKEND=torch, everything runs
in plain PyTorch, with the same result. The library has no state, and shares PyTorch's OpenMP threads. Tensors must be
plain ones on CPU, see :func:`rmm_linear.backends.select.backend_of`.
"""

from rmm_linear.backends.native.library import (
    countsketch,
    decode_normal,
    gather_rows,
    is_available,
    pack,
    philox,
    signs_and_shifts,
    unpack,
    unrotate,
    unrotate_normal,
)

__all__ = [
    "countsketch",
    "decode_normal",
    "gather_rows",
    "is_available",
    "pack",
    "philox",
    "signs_and_shifts",
    "unpack",
    "unrotate",
    "unrotate_normal",
]
