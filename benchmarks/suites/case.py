"""What is measured: a case, and what a provider makes of it for the gate, the clock and the memory count alike."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """One set of sizes that all providers are measured on, side by side."""

    suite: str  # "linear", "kernels", "host", "operators" or "blocks"
    name: str  # its title, without dtype and ratio
    device: str  # "cpu" or "cuda"
    dtype: str  # name of a torch dtype, as "float32"
    # what the suite needs: linear (N, I, O), kernels (N, D), operators those of the tensors, host (N, I, layers),
    # blocks (batch, length, layers)
    sizes: tuple[int, ...]
    check: int = 0  # tokens that the correctness gate looks at
    ratio: float = 0.1  # K/N, or for packed sketches bytes kept by bytes of the input
    rounds: int = 5  # times that every provider's turn comes
    tiny: bool = False  # whether the model is a toy, to try the command
    backend: str = "torch"  # "torch" or "triton", for kernels, operators and blocks
    dropout: float = 0.0  # of blocks
    draws: int = 6  # seeds that the correctness gate looks at

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @contextlib.contextmanager
    def on_backend(self) -> Iterator[None]:
        """On a CPU, run the operators of the library in Triton's interpreter, if that is the case's backend."""
        before = os.environ.get("RMM_BACKEND")
        if self.backend == "triton" and self.device == "cpu":
            os.environ["RMM_BACKEND"] = "triton"
        try:
            yield
        finally:
            os.environ.pop("RMM_BACKEND", None)
            os.environ.update({} if before is None else {"RMM_BACKEND": before})


@dataclass(frozen=True)
class Outcome:
    exact: dict[str, Tensor]  # what every provider must make alike
    random: list[Tensor]  # what sketches make a random, unbiased estimate of: gradients with respect to the weights


@dataclass(frozen=True)
class Setup:
    """A provider, ready to run on a case."""

    run: Callable[[], object]  # what is timed: forward and backward pass, or kernel
    outcome: Callable[[int], Outcome]  # one run on the gate's input for a seed
    expected: Callable[[int], Outcome]  # what the reference makes of the same input for that seed
    module: nn.Module | None = None  # the module whose kept bytes count; None where nothing is kept
    forward: Callable[[], Tensor] | None = None  # its forward pass; the result keeps alive what the backward pass needs
    moved: int = 0  # bytes that cannot but be read and written, for kernels
    tolerance: float | None = None  # relative error that exact parts may have; None is that of the dtype
    # how far the mean of its estimates may be off, where a small bias is known; None is that of rounding
    slack: float | None = None
