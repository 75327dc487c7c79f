"""Compiled forms of what plain PyTorch does slowly on CPU: random numbers and packing.

Built when the package is installed, if there is a C compiler; without it, and with RMM_BACKEND=torch, everything runs
in plain PyTorch, with the same result. The library has no state and no threads of its own.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from rmm_linear.backends import requested_backend

_SMALLEST_SHARE = 1 << 16  # elements that are worth a thread


@functools.cache
def _load() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("rmm_linear.native._library")
    if spec is None or spec.origin is None:
        return None
    return ctypes.CDLL(spec.origin)


def applies_to(*tensors: Tensor) -> bool:
    """Say whether the compiled code can take these tensors.

    Args:
        *tensors: Tensors of any device and class.

    Returns:
        True if the library was built, is wanted, and all are plain tensors on CPU.
    """
    if requested_backend() == "torch" or _load() is None:
        return False
    return all(type(tensor) is Tensor and tensor.device.type == "cpu" for tensor in tensors)


def philox(seed: Tensor, offset: Tensor, stream: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what :func:`rmm_linear.sketches.philox.philox` does.

    Args:
        seed: Key, int64 with one element.
        offset: Counters, int64, any shape.
        stream: Number of the stream.

    Returns:
        Four int64 tensors of the shape of ``offset``.
    """
    offset = offset.contiguous()
    words = torch.empty(4, *offset.shape, dtype=torch.int64)
    key, count = ctypes.c_int64(int(seed)), ctypes.c_int64(offset.numel())
    _function("rmm_philox")(key, ctypes.c_int64(stream), count, _pointer(offset), _pointer(words))
    first, second, third, fourth = words.unbind()
    return first, second, third, fourth


def pack(
    matrix: Tensor, bits: int, signs: Tensor, rows: Tensor, columns: Tensor, codes: Tensor, ranges: Tensor
) -> None:
    """Round rows to ``bits`` per element; :mod:`rmm_linear.packing` says how.

    Args:
        matrix: float32, shape (K, I), elements of a row side by side.
        bits: 8, 4 or 2.
        signs: Of the turn, float32, shape (64,).
        rows: Of the chances, int32, shape (K,).
        columns: Of the chances, int32, shape (I,).
        codes: To write, uint8, shape (K, ⌈I · bits / 8⌉), contiguous.
        ranges: To write, bfloat16, shape (K, ⌈I / 64⌉, 2), contiguous.
    """
    width, stride, bit = ctypes.c_int64(matrix.shape[1]), ctypes.c_int64(matrix.stride(0)), ctypes.c_int(bits)
    function = _function("rmm_pack")

    def run(begin: int, end: int) -> None:
        function(
            _pointer(matrix[begin:]), ctypes.c_int64(end - begin), width, stride, bit, _pointer(signs),
            _pointer(rows[begin:]), _pointer(columns), _pointer(codes[begin:]), _pointer(ranges[begin:]),
        )  # fmt: skip

    _in_threads(run, matrix)


def unpack(codes: Tensor, ranges: Tensor, bits: int, matrix: Tensor) -> None:
    """Write the rows that packed storage stands for, whole groups left turned.

    Args:
        codes: uint8, shape (K, ⌈I · bits / 8⌉), contiguous.
        ranges: bfloat16, shape (K, ⌈I / 64⌉, 2), contiguous.
        bits: 8, 4 or 2.
        matrix: To write, float32, shape (K, I), contiguous.
    """
    width, bit = ctypes.c_int64(matrix.shape[1]), ctypes.c_int(bits)
    function = _function("rmm_unpack")

    def run(begin: int, end: int) -> None:
        rows = ctypes.c_int64(end - begin)
        function(_pointer(codes[begin:]), _pointer(ranges[begin:]), rows, width, bit, _pointer(matrix[begin:]))

    _in_threads(run, matrix)


def _function(name: str) -> Callable[..., None]:
    function = getattr(_load(), name)
    function.restype = None
    return function


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _in_threads(run: Callable[[int, int], None], matrix: Tensor) -> None:
    """Cut the rows among as many threads as PyTorch uses; the compiled code runs without the interpreter's lock."""
    rows = matrix.shape[0]
    threads = max(1, min(torch.get_num_threads(), rows, matrix.numel() // _SMALLEST_SHARE))
    cuts = [rows * part // threads for part in range(threads + 1)]
    others = [threading.Thread(target=run, args=cuts[part : part + 2]) for part in range(1, threads)]
    for thread in others:
        thread.start()
    run(0, cuts[1])
    for thread in others:
        thread.join()
