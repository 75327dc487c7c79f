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
    "rmm_channel_gradients": "piqqqqqqqipqppppippi",
    "rmm_countsketch": "pipqqqqqqqpii",
    "rmm_decode_normal": "ppqipii",
    "rmm_encode_normal": "pipqqqqqqippi",
    "rmm_gather_rows": "piqqppqpi",
    "rmm_max_pool": "ppippi",
    "rmm_max_pool_backward": "ppippi",
    "rmm_norm_backward": "piqpqqiipqppppippi",
    "rmm_pack": "pipqqqqqqippi",
    "rmm_pack_channels": "piqqqqqqqfppiqpppi",
    "rmm_pack_derivative": "piqqqpiipqffffffpppi",
    "rmm_pack_gated": "ppiqqqqpiiqqppppi",
    "rmm_pack_mask": "piqqppi",
    "rmm_pack_norm": "piqpqqifiqpppi",
    "rmm_philox": "qqqpp",
    "rmm_signs_and_shifts": "qqqpp",
    "rmm_softmax_gradients": "ppqqi",
    "rmm_transform": "piqqqppppppppqpi",
    "rmm_unpack": "ppqqqiqipii",
    "rmm_unrotate": "piqqqi",
    "rmm_unrotate_normal": "piqqi",
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
    """Say whether the library was built and can be loaded."""
    return _load() is not None


@functools.cache
def level() -> int:
    """Return the level that the functions which run here are compiled for: 4 is AVX-512, 3 AVX2, 0 any processor."""
    return _load().rmm_level()  # pyright: ignore[reportOptionalMemberAccess]


def function(name: str) -> Callable[..., int]:
    return _function(name, level())


@functools.cache
def _function(name: str, level: int) -> Callable[..., int]:
    found = getattr(_load(), f"{name}_{level}")
    found.argtypes = [_TYPES[letter] for letter in SIGNATURES[name]]
    return found


def run(name: str, *arguments: float | None) -> None:
    """Call a function of the library that returns a status."""
    if function(name)(*arguments):
        raise MemoryError(f"No memory for the buffers of {name}, which take some rows of a matrix in each thread.")


def write_seed(stored: Tensor, seed: int | None) -> int:
    """Write a seed at the beginning of stored bytes, and return it; None draws one."""
    seed = draw_seed() if seed is None else seed
    ctypes.c_int64.from_address(stored.data_ptr()).value = seed
    return seed


@functools.cache
def _integers(count: int) -> type[ctypes.Array[ctypes.c_int64]]:
    return ctypes.c_int64 * count  # a type is slow to make


def write_seeds(stored: Tensor, seed: int | None, count: int) -> list[int]:
    """Write the seeds of several matrices at the beginning of stored bytes, and return them."""
    seeds = seeds_of(seed, count)
    _integers(count).from_address(stored.data_ptr())[:] = seeds
    return seeds


def read_seed(stored: Tensor, place: int = 0) -> int:
    """Return a seed at the beginning of stored bytes, the first or another one."""
    return ctypes.c_int64.from_address(stored.data_ptr() + 8 * place).value


def matrix_arguments(matrix: Tensor, index: Tensor | None = None) -> tuple[int, int, int, int, int, int]:
    """Return some rows of a matrix as arguments: pointer, type, index, n, columns, elements from one row to the next.

    matrix: Shape (N, columns), float32 or a half type, the elements of a row side by side. index: int64, shape (n,),
    contiguous; None for all rows.
    """
    rows, columns = matrix.shape
    rows = rows if index is None else len(index)
    return pointer(matrix), TYPES[matrix.dtype], pointer(index), rows, columns, matrix.stride(0)


def pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def threads(tensor: Tensor) -> int:
    shares = tensor.numel() // _SMALLEST_SHARE
    return min(torch.get_num_threads(), shares) if shares > 1 else 1


def philox(seed: Tensor, offset: Tensor, stream: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do what :func:`rmm_linear.sketches.philox.philox` does."""
    offset = offset.contiguous()
    words = offset.new_empty(4, *offset.shape)
    key, count = int(seed), offset.numel()
    function("rmm_philox")(key, stream, count, pointer(offset), pointer(words))
    first, second, third, fourth = words.unbind()
    return first, second, third, fourth


def signs_and_shifts(seed: Tensor, tokens: int, rows: int) -> tuple[Tensor, Tensor]:
    """Do what :func:`rmm_linear.sketches.countsketch.signs_and_shifts` does."""
    signs = seed.new_empty(tokens, dtype=torch.int8)
    shifts = seed.new_empty(-(-tokens // rows))
    function("rmm_signs_and_shifts")(int(seed), tokens, rows, pointer(signs), pointer(shifts))
    return signs, shifts


def pack(
    matrix: Tensor,
    bits: float,
    seed: int,
    codes: int,
    scales: int,
    rows: int,
    first: int = 0,
    index: Tensor | None = None,
    levels: int | None = None,
) -> None:
    """Round rows to ``bits`` per element, as described in :mod:`rmm_linear.packing.pack`.

    matrix: float32, bfloat16 or float16, shape (N, I); elements of a row side by side. seed: Of the rounding, and of
    the sketch. codes, scales: Addresses to write to, uint8, contiguous, of the shapes of
    :func:`rmm_linear.packing.encoded_parts`. rows: K. Of fewer rows than ``matrix`` has, its CountSketch is packed,
    row by row; sums of bfloat16 are rounded to it before. first: The number of the first row, where they are a part of
    a matrix. index: Rows of ``matrix`` that are taken instead of all, int64, shape (N,), contiguous.
    levels: Those of a normal code (:mod:`rmm_linear.packing.normal`), instead of ``bits``.
    """
    name, how = ("rmm_pack", bits) if levels is None else ("rmm_encode_normal", levels)
    run(name, *matrix_arguments(matrix, index), rows, seed, first, how, codes, scales, threads(matrix))


def unpack(
    codes: int, scales: int, bits: int, seed: int, matrix: Tensor, first: int = 0, *, rotated: bool = True
) -> None:
    """Write rows that codes and scales represent.

    codes, scales: Addresses of what :func:`pack` wrote. matrix: Written to; float32, bfloat16 or float16, shape (n, I),
    contiguous: the rows from ``first`` on. rotated: Whether whole groups stay rotated.
    """
    run(
        "rmm_unpack", codes, scales, first, *matrix.shape, bits, seed, not rotated,
        matrix.data_ptr(), TYPES[matrix.dtype], threads(matrix),
    )  # fmt: skip


def decode_normal(codes: int, scales: int, levels: int, matrix: Tensor) -> None:
    """Write the rows of a normal code, which stay rotated."""
    groups = matrix.numel() // 128
    function("rmm_decode_normal")(
        codes, scales, groups, levels, matrix.data_ptr(), TYPES[matrix.dtype], threads(matrix)
    )


def unrotate_normal(matrix: Tensor, seed: int) -> None:
    """Undo the rotations of a normal code in a contiguous matrix of whole groups, float32 or half, in place."""
    run("rmm_unrotate_normal", matrix.data_ptr(), TYPES[matrix.dtype], matrix.numel() // 128, seed, threads(matrix))


def unrotate(matrix: Tensor, seed: int) -> None:
    """Undo the rotation of whole groups of 64 columns of a contiguous matrix, float32 or half, in place."""
    function("rmm_unrotate")(matrix.data_ptr(), TYPES[matrix.dtype], *matrix.shape, seed, threads(matrix))


def countsketch(
    matrix: Tensor,
    seed: int,
    rows: int,
    begin: int,
    end: int,
    index: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the rows begin … end − 1 of SᵀM, as described in :mod:`rmm_linear.sketches.countsketch`; sums are float32.

    matrix: M, float32, bfloat16 or float16, shape (N, D), N > K, elements of a row side by side. index: Rows of
    ``matrix`` that are taken instead of all, int64, shape (N,), contiguous. dtype: Of the result; None is that of
    ``matrix``.
    """
    z = matrix.new_empty(end - begin, matrix.shape[1], dtype=dtype)
    run(
        "rmm_countsketch", *matrix_arguments(matrix, index), rows, seed, begin, end - begin, z.data_ptr(),
        TYPES[z.dtype], threads(matrix),
    )  # fmt: skip
    return z


def gather_rows(matrix: Tensor, index: Tensor, scale: Tensor) -> Tensor:
    """Do what :func:`rmm_linear.sketches.gather` does: rows side by side, index int64 and scale float32 contiguous."""
    z = matrix.new_empty(len(index), matrix.shape[1])
    function("rmm_gather_rows")(
        pointer(matrix), TYPES[matrix.dtype], matrix.stride(0), matrix.shape[1], pointer(index), pointer(scale),
        len(index), pointer(z), threads(z),
    )  # fmt: skip
    return z
