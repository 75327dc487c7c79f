"""The two products that the backward pass of a gated MLP needs, each packed.

A gated MLP computes h = act(a) · b, element by element, with a the output of its gate and b that of its second linear
layer. With y the gradient of the loss with respect to h,

    da = y · p,  p = b · act'(a)        db = y · s,  s = act(a)

Both gradients are linear in what is saved, p and s. Each is packed in rotated groups as :mod:`rmm_linear.packing.pack`
describes, with a seed of its own, so E[da^] = y · E[p^] = da and E[db^] = db. The error of an element of a group has
the variance scale² / 12 before it is rotated back and after it, since the rotation is orthonormal and the errors of two
elements are uncorrelated: E‖da^ − da‖² = Σ y² · scale² / 12 over all elements.

act and act' are those of :mod:`rmm_linear.packing.pointwise`, in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rmm_linear._support.autocast import without_autocast
from rmm_linear.packing.pack import pack_parts, packed_parts, unpack
from rmm_linear.packing.pointwise import FUNCTIONS
from rmm_linear.packing.stored import Part

SEEDS: Part = ((2,), torch.int64)  # of p and of s


class Packed(NamedTuple):
    """Codes and scales of a matrix, as :func:`rmm_linear.packing.pack` makes them."""

    codes: Tensor
    scales: Tensor


# The place of a name is its number in the C library and in the kernels.
ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")


@without_autocast
def pack_gated(
    a: Tensor, b: Tensor, seeds: Tensor, activation: str, bits: int, wanted: tuple[bool, bool], index: Tensor | None
) -> list[Packed | None]:
    """Pack p = b · act'(a) and s = act(a); None for one that is not wanted.

    a, b: Floating point, shape (N, C). seeds: int64, shape (2,): of p and of s. activation: One of :data:`ACTIVATIONS`.
    index: Rows to store, int64, shape (n,); None for all.
    """
    rows = len(a) if index is None else len(index)

    def part(which: int) -> Callable[[int, int], Tensor]:
        def rows_of(begin: int, end: int) -> Tensor:
            taken = slice(begin, end) if index is None else index[begin:end]
            gate, other = (_wide(matrix[taken]) for matrix in (a, b))
            function = FUNCTIONS[activation]
            return function.value(gate) if which else other * function.derivative(gate)

        return rows_of

    return [
        Packed(*pack_parts(part(which), (rows, a.shape[1]), bits, seeds[which : which + 1])) if wanted[which] else None
        for which in range(2)
    ]


@without_autocast
def apply_gated(
    y: Tensor, seeds: Tensor, packed: list[Packed | None], bits: int, index: Tensor | None
) -> list[Tensor | None]:
    """Multiply a gradient of act(a) · b, shape (N, C), by p and by s: da and db; None where one is missing."""
    stored = _wide(y if index is None else y.index_select(0, index))
    found: list[Tensor | None] = []
    for which, product in enumerate(packed):
        if product is None:
            found.append(None)
            continue
        values = unpack(*product, seeds[which : which + 1], bits, y.shape[1], stored.dtype)
        gradient = values.mul_(stored).to(y.dtype)
        found.append(gradient if index is None else torch.zeros_like(y).index_copy_(0, index, gradient))
    return found


def stored_parts(rows: int, columns: int, bits: int, count: int) -> list[Part]:
    """Return the shapes and dtypes of the two seeds, and of codes and scales of each product that is stored."""
    return [SEEDS, *packed_parts(rows, columns, bits) * count]


def check_factors(a: Tensor, b: Tensor) -> None:
    """Refuse two factors of which one cannot be read as the other, as the C library and the kernels do."""
    if a.dtype != b.dtype or a.shape != b.shape:
        got = f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
        raise ValueError(
            f"a and b must have one dtype and one shape, got {got}. Cast b with b.to(a.dtype), and b.expand_as(a)."
        )


def _wide(matrix: Tensor) -> Tensor:
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32))
