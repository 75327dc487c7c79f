"""The packed products of a gated MLP with the C library."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from rmm_linear.backends.native.library import TYPES, pointer, read_seed, run, threads, write_seeds
from rmm_linear.packing import check_bits, empty_packed
from rmm_linear.packing.gated import ACTIVATIONS, Packed, check_factors, stored_parts
from rmm_linear.packing.stored import new_stored, offsets


def pack_gated(
    a: Tensor, b: Tensor, seeds: Tensor, activation: str, bits: int, wanted: tuple[bool, bool], index: Tensor | None
) -> list[Packed | None]:
    check_bits(bits)
    rows, columns = len(a) if index is None else len(index), a.shape[1]
    packed = [Packed(*empty_packed(rows, columns, bits, a)) if needed else None for needed in wanted]
    write_gated(a, b, index, rows, seeds.tolist(), activation, bits, _pointers(packed))
    return packed


def stored_gated(
    a: Tensor,
    b: Tensor,
    activation: str,
    bits: int,
    seed: int | None,
    index: Tensor | None,
    needs_a: bool,
    needs_b: bool,
) -> Tensor:
    """Return the bytes of :func:`rmm_linear.ops.gated.keep_gated`."""
    check_factors(a, b)
    rows, columns = a.shape[0] if index is None else index.shape[0], a.shape[1]
    places, size = _layout(rows, columns, bits, needs_a, needs_b)
    stored = new_stored(a, size, places)
    seeds, base = write_seeds(stored, seed, 2), stored.data_ptr()
    at = [None if place is None else base + place for place in places]
    write_gated(a, b, index, rows, seeds, activation, bits, at)
    return stored


def apply_stored(
    y: Tensor, stored: Tensor, bits: int, index: Tensor | None, needs_a: bool, needs_b: bool
) -> list[Tensor | None]:
    """Return what :func:`rmm_linear.ops.gated.apply_gated` does."""
    rows, base = y.shape[0] if index is None else index.shape[0], stored.data_ptr()
    at = [None if one is None else base + one for one in _layout(rows, y.shape[1], bits, needs_a, needs_b)[0]]
    return read_gated(y, index, rows, (read_seed(stored), read_seed(stored, 1)), bits, at)


@functools.lru_cache(maxsize=4096)
def _layout(rows: int, columns: int, bits: int, needs_a: bool, needs_b: bool) -> tuple[list[int | None], int]:
    """Where codes and scales of both products begin, None for one that is not stored; and all bytes."""
    (_, *places), size = offsets(tuple(stored_parts(rows, columns, check_bits(bits), needs_a + needs_b)))
    absent: list[int | None] = [None, None]
    return [*(places[:2] if needs_a else absent), *(places[-2:] if needs_b else absent)], size


def write_gated(
    a: Tensor,
    b: Tensor,
    index: Tensor | None,
    rows: int,
    seeds: Sequence[int],
    activation: str,
    bits: int,
    places: Sequence[int | None],
) -> None:
    """Write both products at addresses, None for one that is not wanted."""
    a, b = (matrix if matrix.stride(1) == 1 else matrix.contiguous() for matrix in (a, b))
    index = None if index is None else index.contiguous()
    run(
        "rmm_pack_gated", a.data_ptr(), b.data_ptr(), TYPES[a.dtype], a.stride(0), b.stride(0), rows, a.shape[1],
        pointer(index), ACTIVATIONS.index(activation), bits, *seeds, *places, threads(a),
    )  # fmt: skip


def apply_gated(
    y: Tensor, seeds: Tensor, packed: list[Packed | None], bits: int, index: Tensor | None
) -> list[Tensor | None]:
    """Return what :func:`rmm_linear.packing.gated.apply_gated` does."""
    packed = [None if one is None else Packed(*(tensor.contiguous() for tensor in one)) for one in packed]
    rows = len(y) if index is None else len(index)
    return read_gated(y, index, rows, seeds.tolist(), bits, _pointers(packed))


def read_gated(
    y: Tensor, index: Tensor | None, rows: int, seeds: Sequence[int], bits: int, places: Sequence[int | None]
) -> list[Tensor | None]:
    """Return the products of ``y`` with what lies at addresses; None for one at None."""
    y, index = y.contiguous(), None if index is None else index.contiguous()
    make = torch.empty_like if index is None else torch.zeros_like
    found = [None if codes is None else make(y) for codes in places[::2]]
    run(
        "rmm_apply_gated", y.data_ptr(), TYPES[y.dtype], rows, y.shape[1], pointer(index), bits, *seeds, *places,
        *map(pointer, found), threads(y),
    )  # fmt: skip
    return found


def _pointers(packed: list[Packed | None]) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for one in packed for tensor in one or (None, None)]
