"""Families of sketches S (N, K): unbiased, drawn from one seed, with their exact variance.

A sketch is a linear map M (N, D) → SᵀM (K, D). It follows from its seed alone, through counter-based random numbers, so
the forward pass can sketch X, the backward pass Y, and a kernel on another device either, all with the same S.

Source: Bershatsky et al. 2022, arXiv 2201.13195 (gaussian, rademacher, dct, dft). The variances are derived in each
family's module; they differ from the ones stated there.
"""

from __future__ import annotations

from torch import Tensor

from rmm_linear.sketches.countsketch import COUNTSKETCH
from rmm_linear.sketches.dense import GAUSSIAN, RADEMACHER
from rmm_linear.sketches.family import Family, Moments
from rmm_linear.sketches.rows import ROWS
from rmm_linear.sketches.transforms import DCT, DFT, HADAMARD

FAMILIES: dict[str, Family] = {
    family.name: family for family in (COUNTSKETCH, ROWS, RADEMACHER, GAUSSIAN, HADAMARD, DCT, DFT)
}
KINDS: tuple[str, ...] = tuple(FAMILIES)


def sketch(matrix: Tensor, *, kind: str, seed: Tensor, rows: int, block: int | None = None) -> Tensor:
    """Return SᵀM for the S that ``kind`` draws from ``seed``.

    Args:
        matrix: M, shape (N, D), floating point.
        kind: One of :data:`KINDS`.
        seed: int64 with one element, on the device of ``matrix``.
        rows: K, 1 ≤ K ≤ N.
        block: Tokens per block of a block-diagonal S (gaussian and rademacher); None mixes all tokens.

    Returns:
        Shape (K, D), dtype of ``matrix``. With ``block``, K is rounded up to a whole number per block.

    Example:
        >>> import torch
        >>> m = torch.ones(8, 3)
        >>> sketch(m, kind="rows", seed=torch.tensor(0), rows=2)
        tensor([[2., 2., 2.],
                [2., 2., 2.]])
    """
    return FAMILIES[kind].sketch(matrix, seed, rows, block)


__all__ = ["FAMILIES", "KINDS", "Family", "Moments", "sketch"]
