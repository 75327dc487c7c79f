"""Family: a linear map that follows from a seed, with its exact variance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rmm_linear.sketches.philox import Generator


@dataclass(frozen=True)
class Family:
    """One family of sketches S, with E[S Sᵀ] = 1.

    ``count`` is None or n, int64 of shape (1,), on the matrix's device: the rows from n on are zero and are not
    tokens.
    """

    name: str
    summary: str  # one line for tables and help texts
    # Sketch(matrix, seed, rows, block, count, generator) maps a matrix of shape (N, D) to SᵀM of shape (K, D). The map
    # is linear and depends on nothing but the seed, N, rows, block and count.
    sketch: Callable[[Tensor, Tensor, int, int | None, Tensor | None, Generator], Tensor]
    # Variance(x, y, rows, block, count) is E‖dŴ − dW‖² for x of shape (N, I) and y of shape (N, O), a float64 scalar
    variance: Callable[[Tensor, Tensor, int, int | None, Tensor | None], Tensor]
    blocks: bool = False  # whether the family supports block
    # Whether the entries of S for a token do not depend on N, as long as block is None. Then zero rows at the end can
    # be cut off without changing the result.
    local: bool = False
    # Part(matrix, seed, rows, generator) returns a function of begin and end that makes the rows begin … end − 1 of
    # SᵀM, on CPU; None if the rows can only be made all at once
    part: Callable[[Tensor, Tensor, int, Generator], Callable[[int, int], Tensor]] | None = None
    # Whether the map on CPU reads the seed as a Python number, so that torch.vmap over seeds is impossible
    reads_seed: bool = False


@dataclass(frozen=True)
class Moments:
    """The three numbers from which every variance is computed: P, g and d."""

    p: Tensor
    g: Tensor
    d: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> Moments:
        """Compute the moments of X (N, I) and Y (N, O), in float64: their differences cancel where α is near 1."""
        x, y = x.double(), y.double()
        x_norms, y_norms = x.square().sum(1), y.square().sum(1)
        return cls(x_norms.sum() * y_norms.sum(), (x.T @ y).square().sum(), (x_norms * y_norms).sum())

    @property
    def signed(self) -> Tensor:
        """P + g − 2d: K times the variance of a dense sketch of random signs."""
        return self.p + self.g - 2 * self.d


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)
