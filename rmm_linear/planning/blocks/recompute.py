"""Recompute a module in the backward pass, bit by bit as it ran before: random numbers, buffers and sketches repeat."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rmm_linear.context.recomputation import RepeatedSeeds
from rmm_linear.planning.replay.replayed import Replayed
from rmm_linear.planning.step.flops import PRODUCTS


class Recomputed:
    """The forward pass of a module under activation checkpointing.

    It takes the place of the method ``forward`` of one module, so hooks of the module itself run once.
    """

    def __init__(self, module: nn.Module, *, selective: bool = False) -> None:
        """Wrap a module's forward pass, for :meth:`attach`. ``selective`` saves the results of products."""
        self.module = module
        self.selective = selective
        self.replaced: Any = None  # by another library, or by tiles

    @property
    def inner(self) -> Callable[..., Any]:
        """The module's own forward pass; looked up at each call, so that copies and pickled models have their own."""
        return MethodType(type(self.module).forward, self.module) if self.replaced is None else self.replaced

    def attach(self) -> None:
        """Recompute the module from now on."""
        self.replaced = self.module.__dict__.get("forward")
        self.module.forward = self

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        if self.replaced is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.forward = self.replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass, and again in the backward pass."""
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
        seen = replayed.seen()

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            if not self.selective:
                return nullcontext(), replayed.again(seen, seeds.again)
            saved, cached = create_selective_checkpoint_contexts(_keep_products)
            return saved, replayed.again(seen, seeds.again, lambda: cached)

        # Keyword arguments go past checkpoint, which has some of its own.
        run = functools.partial(self.inner, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts)


def _run(recomputed: Recomputed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return recomputed._run(args, kwargs)


_uncompiled: Any = torch.compiler.disable(_run)  # what a repetition needs is nothing for a compiler to trace


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    packet = getattr(operator, "_overloadpacket", operator)
    return CheckpointPolicy.MUST_SAVE if packet in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
