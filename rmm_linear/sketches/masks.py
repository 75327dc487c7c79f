"""TokenMask: which rows of a batch are tokens that reach the loss."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenMask:
    """The valid rows as a permutation and a count: shapes are static, and nothing is copied to the host."""

    order: Tensor  # int64, shape (N,): indices of the valid rows in ascending order, then those of the others
    count: Tensor  # int64, shape (1,): n, the number of valid rows
    length: int | None = None  # of a sequence, if all rows are those of sequences of one length

    @classmethod
    def of(cls, mask: Tensor, length: int | None = None) -> TokenMask:
        """Rank the rows of a mask, shape (N,), that is true or non-zero for tokens that reach the loss."""
        mask = mask.bool()
        return cls(torch.argsort(mask, descending=True, stable=True), mask.sum().view(1), length)

    @property
    def valid(self) -> Tensor:
        """Which rows are valid, bool, shape (N,)."""
        place = torch.arange(len(self.order), device=self.order.device)
        return torch.zeros_like(self.order, dtype=torch.bool).scatter_(0, self.order, place < self.count)

    @functools.cached_property
    def valid_count(self) -> int:
        """N. The first use waits for a device other than the CPU, unless it is known."""
        return int(self.count)

    @functools.cached_property
    def index(self) -> Tensor:
        """Indices of the valid rows, int64, shape (n,)."""
        return self.order[: self.valid_count]

    @functools.cached_property
    def answers(self) -> list[Any]:
        """The facts that are known of other masks used with this one."""
        return []

    def know_count(self, count: int) -> None:
        """Set :attr:`valid_count`, which the caller has read."""
        vars(self)["valid_count"] = count

    def compact(self, matrix: Tensor) -> Tensor:
        """Move the valid rows to the front and set the others to zero."""
        if matrix.device.type == "cpu":
            count = self.valid_count
            tail = matrix.new_zeros(matrix.shape[0] - count, matrix.shape[1])
            return torch.cat((matrix.index_select(0, self.order[:count]), tail))
        valid = torch.arange(matrix.shape[0], device=matrix.device) < self.count
        return matrix.index_select(0, self.order).where(valid.unsqueeze(1), 0)
