"""The packed products of a gated MLP with the C library."""

from __future__ import annotations

import torch
from torch import Tensor

from rmm_linear.backends.native import rounding_noise
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
    noise, index = _noise(seeds, rows, columns), None if index is None else index.contiguous()
    a, b = (matrix if matrix.stride(1) == 1 else matrix.contiguous() for matrix in (a, b))
    count = threads(a)
    buffer = a.new_empty(count, 2, columns, dtype=torch.float32)
    is_infinite = function("rmm_pack_gated")(
        pointer(a), pointer(b), TYPES[a.dtype], a.stride(0), b.stride(0), rows, columns, pointer(index),
        ACTIVATIONS.index(activation), bits, *map(pointer, noise), *_pointers(packed), pointer(buffer), count,
    )  # fmt: skip
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
    noise, index = _noise(seeds, rows, columns), None if index is None else index.contiguous()
    packed = [None if one is None else Packed(*(tensor.contiguous() for tensor in one)) for one in packed]
    y = y.contiguous()
    function("rmm_apply_gated")(
        pointer(y), TYPES[y.dtype], rows, columns, pointer(index), bits,
        *map(pointer, noise), *_pointers(packed), *map(pointer, found), threads(y),
    )  # fmt: skip
    return found


def _noise(seeds: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The random numbers of both products: signs (2, 64), of rows (2, rows) and of columns (2, columns)."""
    first, second = (rounding_noise(seeds[i : i + 1], ROUNDING_STREAM, rows, columns) for i in range(2))
    signs, a, c = (torch.stack(pair) for pair in zip(first, second, strict=True))
    return signs, a, c


def _pointers(packed: list[Packed | None]) -> list[int]:
    return [pointer(tensor) for one in packed for tensor in one or (None, None)]
