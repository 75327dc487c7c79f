"""Recompute a module in the backward pass, bit by bit as it ran before: random numbers, buffers and sketches repeat."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from rmm_linear.context.recomputation import RepeatedSeeds
from rmm_linear.planning.blocks.plan import ATTENTION, SELECTIVE
from rmm_linear.planning.blocks.results import Results
from rmm_linear.planning.replay.numbers import DrawnNumbers
from rmm_linear.planning.replay.replayed import Replayed
from rmm_linear.planning.replay.wrapped import Wrapped
from rmm_linear.planning.step.flops import ATTENTIONS, PRODUCTS

_SAVED = {SELECTIVE: PRODUCTS, ATTENTION: ATTENTIONS}


class Recomputed(Wrapped):
    """The forward pass of a module under activation checkpointing."""

    def __init__(self, module: nn.Module, saves: str | None = None) -> None:
        """Wrap a module's forward pass. ``saves``: the operators whose results are saved, by the word of a plan."""
        super().__init__(module)
        self.saves = saves

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass, and again in the backward pass."""
        if self.is_off:
            return self.inner(*args, **kwargs)
        return _uncompiled(self, args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        if any(hasattr(one, "get_seq_length") for one in (*args, *kwargs.values())):
            raise RuntimeError(
                f"{type(self.module).__name__} was given a cache of keys and values, to which it would add them twice. "
                "Set model.config.use_cache=False."
            )
        replayed, seeds = Replayed([self.module], tree_leaves((args, kwargs))), RepeatedSeeds(self.module)
        seen, drawn = replayed.seen(), DrawnNumbers(replayed.devices)

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            if not self.saves:  # also an empty set, of models that were pickled by earlier versions
                return nullcontext(), replayed.again(seen, drawn.again, seeds.again)
            results = Results(_SAVED[self.saves])
            return results.saving(), replayed.again(seen, drawn.again, seeds.again, results.returning)

        # Keyword arguments go past checkpoint, which has some of its own, and looks for devices in the others alone.
        run = functools.partial(self.inner, **kwargs)
        output = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        drawn.settle()
        replayed.share(seen)
        return output


def _run(recomputed: Recomputed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return recomputed._run(args, kwargs)


_uncompiled: Any = torch.compiler.disable(_run)  # what a repetition needs is nothing for a compiler to trace
