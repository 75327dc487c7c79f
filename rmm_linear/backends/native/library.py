"""Load the C library, and pass tensors to its functions."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MISSING = (
    "The C library was not built when rmm_linear was installed, for want of a C compiler, so plain PyTorch does its "
    "work on CPU. Results are the same; a step of RoBERTa-base took 1.4 times the exact model's so, and less than 1.1 "
    "with the library (two AMD EPYC cores). Install gcc or clang, and then rmm_linear again with "
    "pip install --force-reinstall --no-deps, from where it was installed before: -e . in a clone."
)
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


def function(name: str, result: type[ctypes.c_int] | None = None) -> Callable[..., int]:
    """Return a function of the library.

    Args:
        name: Its name.
        result: Type of its result; None for none.

    Returns:
        The function; it takes the objects that :func:`pointer`, :func:`long` and ctypes make.
    """
    found = getattr(_load(), name)
    found.restype = result
    return found


def matrix_arguments(matrix: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64]:
    """Return a matrix as arguments.

    Args:
        matrix: Shape (rows, columns), the elements of a row side by side.

    Returns:
        Pointer, rows, columns, and elements from one row to the next.
    """
    return pointer(matrix), long(matrix.shape[0]), long(matrix.shape[1]), long(matrix.stride(0))


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Return a tensor's memory as an argument.

    Args:
        tensor: The tensor, or None for a null pointer.

    Returns:
        The pointer; the tensor must outlive its use.
    """
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def long(number: int) -> ctypes.c_int64:
    """Return a number as an argument.

    Args:
        number: A signed 64-bit integer.

    Returns:
        The argument.
    """
    return ctypes.c_int64(number)


def threads(tensor: Tensor) -> ctypes.c_int:
    """Return the number of threads for an operation, as an argument.

    Args:
        tensor: What the operation reads or writes.

    Returns:
        The number of PyTorch's threads, or fewer if the tensor is small.
    """
    return ctypes.c_int(max(1, min(torch.get_num_threads(), tensor.numel() // _SMALLEST_SHARE)))
