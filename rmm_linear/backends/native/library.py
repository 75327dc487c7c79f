"""Load the C library, and pass tensors to its functions."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from rmm_linear.sketches.seeds import draw_seed, seeds_of

logger = logging.getLogger(__name__)

MISSING = (
    "The C library was not built when rmm_linear was installed, for want of a C compiler, so plain PyTorch does its "
    "work on CPU. Results are the same; a step of RoBERTa-base took 1.4 times the exact model's so, and less than 1.1 "
    "with the library (two AMD EPYC cores). Install gcc or clang, and then rmm_linear again with "
    "pip install --force-reinstall --no-deps, from where it was installed before: -e . in a clone."
)
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of elements.h
# Arguments of every function: p a pointer, q an int64, i an int, f a float.
SIGNATURES = {
    "rmm_apply_derivative": "pipqqpiiffqpi",
    "rmm_apply_gated": "piqqpiqqppppppi",
    "rmm_apply_mask": "pipqqpfpi",
    "rmm_countsketch": "pipqqqqqqqpii",
    "rmm_gather_rows": "piqqppqpi",
    "rmm_norm_backward": "piqpqqiipqppppippi",
    "rmm_pack": "pipqqqqqqippi",
    "rmm_pack_derivative": "piqqqpiipqfffffqpi",
    "rmm_pack_gated": "ppiqqqqpiiqqppppi",
    "rmm_pack_mask": "piqqppi",
    "rmm_pack_norm": "piqpqqifiqpppi",
    "rmm_philox": "qqqpp",
    "rmm_signs_and_shifts": "qqqpp",
    "rmm_softmax_gradients": "ppqqi",
    "rmm_transform": "piqqqppppppppqpi",
    "rmm_unpack": "ppqqqiqipii",
    "rmm_unrotate": "pqqqi",
}
_TYPES = {"p": ctypes.c_void_p, "q": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
_SMALLEST_SHARE = 1 << 16  # elements per thread, at least: fewer do not outweigh its overhead


@functools.cache
def _load() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("rmm_linear.backends.native._library")
    if spec is None or spec.origin is None:
        logger.warning(MISSING)  # once, at first use: the result is cached
        return None
    try:
        return ctypes.CDLL(spec.origin)
    except OSError as error:  # built on another machine, as in a copied folder
        logger.warning("%s cannot be loaded (%s); plain PyTorch is used instead.", spec.origin, error)
        return None


def is_available() -> bool:
    """Say whether the library was built and can be loaded.

    Returns:
        False if plain PyTorch is used instead.
    """
    return _load() is not None


@functools.cache
def level() -> int:
    """Return for which processors the functions are compiled that run here.

    Returns:
        4 with AVX-512, 3 with AVX2, 0 for every other processor; the library has all that exist for its machine type.
    """
    return _load().rmm_level()  # pyright: ignore[reportOptionalMemberAccess]


def function(name: str) -> Callable[..., int]:
    """Return a function of the library."""
    return _function(name, level())


@functools.cache
def _function(name: str, level: int) -> Callable[..., int]:
    found = getattr(_load(), f"{name}_{level}")
    found.argtypes = [_TYPES[letter] for letter in SIGNATURES[name]]
    return found


def run(name: str, *arguments: float | None) -> bool:
    """Call a function of the library that returns a status.

    Raises:
        MemoryError: If it had no memory for its buffers.
    """
    status = function(name)(*arguments)
    if status > 1:
        raise MemoryError(f"No memory for the buffers of {name}, which take some rows of a matrix in each thread.")
    return status == 1


def write_seed(stored: Tensor, seed: int | None) -> int:
    """Write a seed at the beginning of stored bytes, and return it; None draws one."""
    seed = draw_seed() if seed is None else seed
    ctypes.c_int64.from_address(stored.data_ptr()).value = seed
    return seed


def write_seeds(stored: Tensor, seed: int | None, count: int) -> list[int]:
    """Write the seeds of several matrices at the beginning of stored bytes, and return them."""
    seeds = seeds_of(seed, count)
    (ctypes.c_int64 * count).from_address(stored.data_ptr())[:] = seeds
    return seeds


def read_seed(stored: Tensor, place: int = 0) -> int:
    """Return a seed at the beginning of stored bytes, the first or another one."""
    return ctypes.c_int64.from_address(stored.data_ptr() + 8 * place).value


def matrix_arguments(matrix: Tensor, index: Tensor | None = None) -> tuple[int, int, int, int, int, int]:
    """Return some rows of a matrix as arguments.

    Args:
        matrix: Shape (N, columns), float32 or a half type, the elements of a row side by side.
        index: int64, shape (n,), contiguous; None for all rows.

    Returns:
        Pointer, type, index, n, columns, and elements from one row to the next.
    """
    rows, columns = matrix.shape
    rows = rows if index is None else len(index)
    return pointer(matrix), TYPES[matrix.dtype], pointer(index), rows, columns, matrix.stride(0)


def pointer(tensor: Tensor | None) -> int:
    """Return a tensor's memory as an argument.

    Args:
        tensor: The tensor, or None for a null pointer.
    """
    return 0 if tensor is None else tensor.data_ptr()


def threads(tensor: Tensor) -> int:
    """Return the number of threads for an operation.

    Returns:
        The number of PyTorch's threads, or fewer if the tensor is small.
    """
    shares = tensor.numel() // _SMALLEST_SHARE
    return min(torch.get_num_threads(), shares) if shares > 1 else 1
