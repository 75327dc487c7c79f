"""Repeat the seeds of converted layers when they are recomputed, so that a recomputation makes the same sketches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from rmm_linear.context.model_context import ModelContext


class RepeatedSeeds:
    """The seeds that the layers of a module take in one forward pass, known by where their count began."""

    def __init__(self, module: nn.Module) -> None:
        """Note where the count of seeds is; to be called before the module's forward pass.

        Args:
            module: A module with converted layers, or without.
        """
        contexts: list[Any] = [getattr(inner, "rmm_context", None) for inner in module.modules()]
        different = {id(context): context for context in contexts if context is not None}.values()
        self._begun: list[tuple[ModelContext, int]] = [
            (context, context._count if context._seeded else 0) for context in different
        ]
        self._seeds: list[int | None] = []

    def finish(self) -> None:
        """Note the step's seed, which the module's first layer may have read; to be called after the forward pass."""
        self._seeds = [context._step_seed for context, _ in self._begun]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run a recomputation inside the block with the seeds of the forward pass.

        Yields:
            Nothing.
        """
        now = [(context._step_seed, context._count) for context, _ in self._begun]
        try:
            for (context, count), seed in zip(self._begun, self._seeds, strict=True):
                context._step_seed, context._count = seed, count
            yield
        finally:
            for (context, _), (seed, count) in zip(self._begun, now, strict=True):
                context._step_seed, context._count = seed, count
