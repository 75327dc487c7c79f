"""Find the Trainer that runs a callback, wrap its next ``training_step``, and compute its loss without a trace in it.

Transformers has no hook for the first two.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from rmm_linear._support.tables import wrapped
from rmm_linear.context.checkpointing import Uncheckpointed
from rmm_linear.memory.inputs import LossOfBatch

_PREPARE = "_prepare_inputs"
_CONTAINERS = (dict, list, set, tuple, deque, defaultdict, OrderedDict, Counter)
# Counters and lists of metrics are small. What is larger is data, which no loss changes.
_MOST_ENTRIES, _MOST_ELEMENTS = 10_000, 1_000_000


def is_trainer(one: Any) -> bool:
    """Say whether an object is a Trainer, as far as the callbacks use one."""
    return callable(getattr(one, "log", None)) and callable(getattr(one, "training_step", None))


def calling_trainer(callback: Any) -> Any:
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
        try:
            return step(*args, **kwargs)
        finally:
            if isinstance(vars(trainer).get(_PREPARE), _Prepared):
                del trainer._prepare_inputs

    trainer.training_step = once


def arguments_of_step(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name the arguments of a training_step: "model", "inputs" and, if it was given, "num_items_in_batch"."""
    return dict(zip(("model", "inputs", "num_items_in_batch"), args, strict=False)) | kwargs


def turn_off_checkpointing(model: torch.nn.Module, args: Any) -> Uncheckpointed:
    """Turn off what the Trainer turned on before training begins, and say so."""
    off = Uncheckpointed(model)
    off.attach()
    if off.is_attached and args.process_index == 0:
        # Printed, not logged, as by the Trainer's own callbacks.
        whose = " (which TRL turns on by default)" if "trl" in sys.modules else ""
        text = (
            f"rmm_linear: activation checkpointing{whose} is off in this training, as "
            'compressed activations save the memory in its place. checkpointing="keep" leaves it on.'
        )
        print(wrapped(text, 2))
    return off


class _Prepared:
    """Returns inputs that were prepared already, where a step asks for them again."""

    def __init__(self, given: Any, prepare: Callable[[Any], Any]) -> None:
        self.given, self.prepare, self.result = given, prepare, prepare(given)

    def __call__(self, given: Any) -> Any:
        return self.result if given is self.given else self.prepare(given)


def prepared_inputs(trainer: Any, given: Any) -> Any:
    """Return the inputs of a step as it prepares them, once: TRL's trainers generate completions there, for example.

    To be called inside of a run of :func:`around_next_step`.
    """
    known = vars(trainer).get(_PREPARE)
    if not (isinstance(known, _Prepared) and known.given is given):
        trainer.model.train()  # as the step does before; an evaluation may have been before it
        known = trainer._prepare_inputs = _Prepared(given, trainer._prepare_inputs)
    return known.result


def loss_call(trainer: Any, model: torch.nn.Module, inputs: Any, count: Any = None) -> LossOfBatch:
    """Make a function that computes the loss of a batch as the Trainer does, and leaves no trace in the Trainer."""
    named = {} if count is None else {"num_items_in_batch": count}

    def loss(batch: Mapping[str, Any]) -> Any:
        with untraced(trainer), trainer.compute_loss_context_manager():
            return trainer.compute_loss(model, dict(batch), **named)

    return LossOfBatch(dict(inputs), loss)


@contextmanager
def untraced(trainer: Any) -> Iterator[None]:
    """Restore what a Trainer counts after the block: numbers, small tensors, and lists and dictionaries of them."""
    before = {name: (value, _copied(value, [_MOST_ENTRIES])) for name, value in vars(trainer).items()}
    try:
        yield
    finally:
        for name in vars(trainer).keys() - before.keys():
            delattr(trainer, name)
        for name, (value, copy) in before.items():
            if vars(trainer).get(name) is not value:
                setattr(trainer, name, value)
            if copy is not None:
                copy()


def _copied(value: Any, left: list[int]) -> Callable[[], None] | None:
    """Copy a container or tensor, of so many entries at most; return a function that writes the copy back into it."""
    left[0] -= 1
    if isinstance(value, Tensor):
        return _copied_tensor(value)
    if type(value) not in _CONTAINERS or len(value) > left[0]:
        return None
    entries = dict(value) if isinstance(value, dict) else list(value)
    inner = [_copied(entry, left) for entry in (entries.values() if isinstance(entries, dict) else entries)]

    def restore() -> None:
        if type(value) is not tuple:
            value.clear()
            (value.update if isinstance(value, dict | set) else value.extend)(entries)
        for one in inner:
            if one is not None:
                one()

    return restore


def _copied_tensor(value: Tensor) -> Callable[[], None] | None:
    if value.requires_grad or value.is_meta or value.is_inference() or value.numel() > _MOST_ELEMENTS:
        return None
    copy, version = value.detach().clone(), value._version

    def restore() -> None:
        if value._version != version:
            with torch.no_grad():
                value.copy_(copy)

    return restore
