"""The packed products of a gated MLP with the C library."""

from __future__ import annotations

import torch
from torch import Tensor

from rmm_linear.backends.native.library import TYPES, function, pointer, threads
from rmm_linear.packing import ROUNDING_STREAM, check_bits, empty_packed, mark_infinite
from rmm_linear.packing.gated import ACTIVATIONS, Packed


def pack_gated(
    a: Tensor, b: Tensor, seeds: Tensor, activation: str, bits: int, wanted: tuple[bool, bool], index: Tensor | None
) -> list[Packed | None]:
    """Pack as :func:`rmm_linear.packing.gated.pack_gated` does."""
    check_bits(bits)
    rows, columns = len(a) if index is None else len(index), a.shape[1]
    packed = [Packed(*empty_packed(rows, columns, bits, a)) if needed else None for needed in wanted]
    (words, noise), index = _noise(seeds, rows, columns), None if index is None else index.contiguous()
    a, b = (matrix if matrix.stride(1) == 1 else matrix.contiguous() for matrix in (a, b))
    count = threads(a)
    buffer = a.new_empty(count, 2, columns, dtype=torch.float32)
    is_infinite = function("rmm_pack_gated")(
        pointer(a), pointer(b), TYPES[a.dtype], a.stride(0), b.stride(0), rows, columns, pointer(index),
        ACTIVATIONS.index(activation), bits, *noise, *_pointers(packed), pointer(buffer), count,
    )  # fmt: skip
    del words  # whose memory was read until now
    if is_infinite:
        for one in packed:
            if one is not None:
                mark_infinite(one.qparams)
    return packed


def apply_gated(
    y: Tensor, seeds: Tensor, packed: list[Packed | None], bits: int, index: Tensor | None
) -> list[Tensor | None]:
    """Return what :func:`rmm_linear.packing.gated.apply_gated` does."""
    rows, columns = len(y) if index is None else len(index), y.shape[1]
    make = y.new_empty if index is None else y.new_zeros
    found = [None if one is None else make(y.shape) for one in packed]
    (words, noise), index = _noise(seeds, rows, columns), None if index is None else index.contiguous()
    packed = [None if one is None else Packed(*(tensor.contiguous() for tensor in one)) for one in packed]
    y = y.contiguous()
    function("rmm_apply_gated")(
        pointer(y), TYPES[y.dtype], rows, columns, pointer(index), bits,
        *noise, *_pointers(packed), *map(pointer, found), threads(y),
    )  # fmt: skip
    del words
    return found


def _noise(seeds: Tensor, rows: int, columns: int) -> tuple[Tensor, tuple[int, int, int]]:
    """The random numbers of both products in one tensor, and the places of two times 64 signs, of rows, of columns."""
    words = torch.empty(2 * (64 + rows + columns), dtype=torch.int32, device="cpu")
    signs = words.data_ptr()
    a = signs + 2 * 4 * 64
    c = a + 2 * 4 * rows
    for i, seed in enumerate(seeds.tolist()):
        places = signs + 4 * 64 * i, a + 4 * rows * i, c + 4 * columns * i
        function("rmm_rounding_noise")(seed, ROUNDING_STREAM, rows, columns, *places)
    return words, (signs, a, c)


def _pointers(packed: list[Packed | None]) -> list[int]:
    return [pointer(tensor) for one in packed for tensor in one or (None, None)]
