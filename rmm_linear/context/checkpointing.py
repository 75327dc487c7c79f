"""Find out whether activation checkpointing is on in a model, turn it off, and on again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import getattr_static
from typing import Any

from torch import nn

from rmm_linear._support.validation import did_you_mean

REPLACE, KEEP = "replace", "keep"

FLAGS = ("gradient_checkpointing", "activation_checkpointing")  # of transformers, by version
_METHODS = ("activation_checkpointing_disable", "gradient_checkpointing_disable")  # the newer name first
_WRAPPER = "CheckpointWrapper"


def is_on(module: nn.Module) -> bool:
    """Say whether one of transformers' flags is set on a module itself, not on one that it asks for attributes."""
    return any(_flag(module, flag) for flag in FLAGS)


def _flag(module: nn.Module, name: str) -> bool:
    return getattr_static(module, name, False) is True


def is_wrapper(module: nn.Module) -> bool:
    return any(kind.__name__ == _WRAPPER for kind in type(module).__mro__)


def how_to_turn_off(model: nn.Module | None) -> str:
    """Say how to turn checkpointing off: by the model's method for its flags, or in one's own code."""
    modules = {} if model is None else dict(model.named_modules())
    if any(map(is_on, modules.values())):
        for name, module in modules.items():
            for method in _METHODS:
                if callable(getattr(module, method, None)):
                    call = ".".join(part for part in ("model", name, method) if part)
                    return f"{call}(), or gradient_checkpointing=False in TrainingArguments"
    if any(map(is_wrapper, modules.values())):
        return "leave out checkpoint_wrapper"
    return "do not call torch.utils.checkpoint"


def is_checkpointed(model: nn.Module) -> bool:
    """Say whether a model has flags of transformers that are set, or modules of torch's checkpoint_wrapper."""
    return any(is_on(module) or is_wrapper(module) for module in model.modules())


def check_checkpointing(value: object) -> None:
    """Raise unless a value says what happens to activation checkpointing."""
    if value not in (REPLACE, KEEP):
        raise ValueError(
            f'checkpointing must be "{REPLACE}", which turns it off as long as something else saves memory, or '
            f'"{KEEP}", got {value!r}.{did_you_mean(value, (REPLACE, KEEP))}'
        )


class Uncheckpointed:
    """Turns activation checkpointing of a model off until it is detached. Its configuration stays as it is."""

    def __init__(self, model: nn.Module) -> None:
        """Begin with a model that nothing was done to."""
        self.model = model
        self._undo: list[Callable[[], None]] = []

    @property
    def is_attached(self) -> bool:
        return bool(self._undo)

    def attach(self) -> None:
        """Turn it off, where it is on."""
        modules: list[Any] = list(self.model.modules())
        for module in modules:
            for flag in FLAGS:
                if _flag(module, flag):
                    setattr(module, flag, False)
                    self._undo.append(partial(setattr, module, flag, True))
            if is_wrapper(module) and module.checkpoint_fn is not _run:
                self._undo.append(partial(setattr, module, "checkpoint_fn", module.checkpoint_fn))
                module.checkpoint_fn = _run

    def detach(self) -> None:
        """Turn it on, where it was."""
        while self._undo:
            self._undo.pop()()

    def released(self) -> Uncheckpointed:
        """Hand over what is off to another one, which turns it on instead."""
        other = Uncheckpointed(self.model)
        other._undo, self._undo = self._undo, []
        return other


@contextmanager
def uncheckpointed(model: nn.Module, checkpointing: str = REPLACE) -> Iterator[Uncheckpointed]:
    """Turn checkpointing off inside of the block, unless it is to be kept."""
    off = Uncheckpointed(model)
    try:
        if checkpointing == REPLACE:
            off.attach()
        yield off
    finally:
        off.detach()


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
