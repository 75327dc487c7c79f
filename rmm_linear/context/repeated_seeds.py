"""Repeat the seeds of converted layers when a module is recomputed that may have been called several times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class RepeatedSeeds:
    """Where the layers of a module began to take seeds in one call of it; made before its forward pass."""

    def __init__(self, module: nn.Module) -> None:
        """Note what the layers have taken until now."""
        contexts: list[Any] = [getattr(inner, "rmm_context", None) for inner in module.modules()]
        different = {id(context): context for context in contexts if context is not None}.values()
        self._begun = [(context, context.seeds, dict(context.seeds.taken)) for context in different]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run a recomputation inside of the block with the seeds of the forward pass."""
        last = [context.seeds for context, *_ in self._begun]
        try:
            for context, seeds, taken in self._begun:
                context.seeds, seeds.repeated = seeds, dict(taken)
            yield
        finally:
            for (context, *_), seeds in zip(self._begun, last, strict=True):
                context.seeds = seeds
