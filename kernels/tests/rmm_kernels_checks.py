"""What comparisons of kernels are made of: inputs on a device, poisoned outputs, and checks with their limits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rmm_linear.backends.triton import kernels
from rmm_linear.sketches import TokenMask
from rmm_linear.sketches.blocks import block_rows
from rmm_linear.sketches.rows import sample
from rmm_linear.sketches.transforms import next_power_of_two

SEED = -123456789012345678
SHAPES = [(60, 17, 70), (50, 7, 130), (33, 32, 1), (9, 1, 64)]  # N, K, D: nothing is a multiple of a tile
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MASKS: dict[str, Callable[[int], Tensor] | None] = {
    "all": None,
    "some": lambda tokens: torch.arange(tokens) % 5 != 1,
    "few": lambda tokens: torch.arange(tokens) % 16 == 3,  # n ≤ K for the larger K
    "none": torch.zeros,
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda m: m[:, 3:43],
    "every second row": lambda m: m[::2, :40],
    "transposed": lambda m: m[:40].T,
}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return ‖found − expected‖ / ‖expected‖: infinite where the shapes differ, NaN where ``found`` has one."""
    if found.shape != expected.shape:
        return math.inf
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


@dataclass(frozen=True)
class Check:
    """One error and its limit.

    Attributes:
        what: What was compared.
        error: Relative RMS error, or share of elements that differ.
        limit: The most it may be.
    """

    what: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the error is a number within its limit."""
        return self.error <= self.limit


@dataclass(frozen=True)
class Inputs:
    """Makes what kernels take, on one device."""

    device: str

    @property
    def seed(self) -> Tensor:
        """The seed, int64, shape (1,)."""
        return torch.tensor([SEED], device=self.device)

    def matrix(self, tokens: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return normal numbers that follow from the shape, (N, D)."""
        generator = torch.Generator().manual_seed(tokens + columns)
        return torch.randn(tokens, columns, generator=generator).to(dtype).to(self.device)

    def mask(self, name: str, tokens: int) -> tuple[TokenMask | None, dict[str, Tensor]]:
        """Return one of :data:`MASKS`, None for all tokens, and the keywords that the kernels take it by."""
        make = MASKS[name]
        if make is None:
            return None, {}
        mask = TokenMask.of(make(tokens).to(self.device))
        return mask, {"order": mask.order, "count": mask.count}

    def dense(self, x: Tensor, kind: str, rows: int, block: int | None, options: dict[str, Any], **more: Any) -> Any:
        """Call the kernel ``dense_sketch`` with the arguments of :func:`rmm_linear.sketches.sketch`."""
        size, _, rows_per_block = block_rows(x.shape[0], rows, block)
        if kind == "hadamard":
            more["index"] = sample(self.seed, next_power_of_two(size), rows_per_block)
        return kernels().dense_sketch(x, self.seed, kind, size, rows_per_block, **options, **more)


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Start outputs as NaN and 255, so that an element that no kernel writes is seen."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        tensor = empty(*size, **options)
        return tensor.fill_(math.nan if tensor.is_floating_point() else 255) if tensor.dtype != torch.int64 else tensor

    with mock.patch.object(torch, "empty", poisoned):
        yield


def close(what: str, found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> Check:
    """Compare numbers up to the rounding of the dtype that was computed in; both must have the same dtype."""
    limit = 1e-5 if dtype == torch.float32 else 5e-3
    if dtype == torch.bfloat16 and found.device.type == "cpu":
        limit = 1e-2  # the interpreter cuts float32 off to bfloat16 instead of rounding it, which doubles the error
    error = relative_error(found, expected) if found.dtype == expected.dtype else math.inf
    return Check(what, error, limit)


def same(what: str, found: Tensor, expected: Tensor, limit: float = 0.0) -> Check:
    """Compare elements bit for bit: ``limit`` is the share that may differ. NaN is different from itself."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return Check(what, math.inf, limit)
    return Check(what, float((found != expected).double().mean()) if found.numel() else 0.0, limit)
