"""Find the Trainer that runs a callback and wrap its next ``training_step``; transformers has no hook for either."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch


def is_trainer(one: Any) -> bool:
    """Say whether an object is a Trainer, as far as the callbacks use one."""
    return callable(getattr(one, "log", None)) and callable(getattr(one, "training_step", None))


def calling_trainer(callback: Any) -> Any:
    """Find the Trainer that is calling a callback."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found: Any = frame.f_locals.get("self")
        if is_trainer(found) and callback in getattr(found.callback_handler, "callbacks", ()):
            return found
        frame = frame.f_back
    raise RuntimeError(
        "RMMCallback must be called by the Trainer that it was added to, and finds none among its callers. "
        "Make the Trainer first, then trainer.add_callback(RMMCallback(trainer))."
    )


def around_next_step(trainer: Any, runs: Sequence[Callable[..., Any]]) -> None:
    """Run functions around the Trainer's next training_step, and around no other, even if one raises.

    Each is called with the next one, or the step, and with the step's arguments, and returns the result.
    """
    before, training_step = vars(trainer).get("training_step"), trainer.training_step

    def once(*args: Any, **kwargs: Any) -> Any:
        if before is None:
            del trainer.training_step
        else:
            trainer.training_step = before
        step = training_step
        for run in reversed(runs):
            step = functools.partial(run, step)
        return step(*args, **kwargs)

    trainer.training_step = once


def arguments_of_step(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name the arguments of a training_step: "model", "inputs" and, if it was given, "num_items_in_batch"."""
    return dict(zip(("model", "inputs", "num_items_in_batch"), args, strict=False)) | kwargs


def loss_call(trainer: Any, model: torch.nn.Module, inputs: Any, count: Any = None) -> Callable[[], Any]:
    """Make a function that computes the loss of a batch as the Trainer does."""
    named = {} if count is None else {"num_items_in_batch": count}

    def loss() -> Any:
        with trainer.compute_loss_context_manager():
            return trainer.compute_loss(model, dict(inputs), **named)

    return loss
