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
    """One set of sizes that all providers are measured on, side by side.

    Attributes:
        suite: "linear", "model", "kernels", "growth", "host", "operators" or "blocks".
        name: Its title, without dtype and ratio.
        device: "cpu" or "cuda".
        dtype: Name of a torch dtype, as "float32".
        sizes: What the suite needs: linear and growth (N, I, O), model (batch, length), kernels (N, D),
            operators those of the tensors, host (N, I, layers), blocks (batch, length, layers).
        check: Tokens (model: sequences) that the correctness gate looks at.
        ratio: K/N, or for packed sketches bytes kept by bytes of the input.
        rounds: Times that every provider's turn comes.
        tiny: Whether the model is a toy, to try the command.
        backend: "torch" or "triton", for kernels, operators and blocks.
        dropout: Of blocks.
        draws: Seeds that the correctness gate looks at.
    """

    suite: str
    name: str
    device: str
    dtype: str
    sizes: tuple[int, ...]
    check: int = 0
    ratio: float = 0.1
    rounds: int = 5
    tiny: bool = False
    backend: str = "torch"
    dropout: float = 0.0
    draws: int = 6

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
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
    """What one run made.

    Attributes:
        exact: What every provider must make alike.
        random: What sketches make a random, unbiased estimate of: gradients with respect to the weights.
    """

    exact: dict[str, Tensor]
    random: list[Tensor]


@dataclass(frozen=True)
class Setup:
    """A provider, ready to run on a case.

    Attributes:
        run: What is timed: forward and backward pass, training step, or kernel.
        outcome: One run on the gate's input for a seed.
        expected: What the reference makes of the same input for that seed.
        module: The module whose kept bytes count; None where nothing is kept.
        forward: Its forward pass; the result keeps alive what the backward pass needs.
        moved: Bytes that cannot but be read and written, for kernels.
        tolerance: Relative error that exact parts may have; None is that of the dtype.
        slack: How far the mean of its estimates may be off, where a small bias is known; None is that of rounding.
    """

    run: Callable[[], object]
    outcome: Callable[[int], Outcome]
    expected: Callable[[int], Outcome]
    module: nn.Module | None = None
    forward: Callable[[], Tensor] | None = None
    moved: int = 0
    tolerance: float | None = None
    slack: float | None = None
