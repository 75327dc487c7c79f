"""Say what surrounds a call: nothing but autograd, a backward pass, a checkpoint, a call of the same module.

PyTorch numbers the nodes of the autograd graph in the order of their creation. While activation checkpointing
recomputes, the node whose backward pass is running was created by the forward pass that is being recomputed. So its
number lies between the next number at the beginning of that pass and the next number at its end.

Whether a module is called inside of a call of itself, and whether a checkpoint runs, only the Python stack tells:
PyTorch runs no hook after a KeyboardInterrupt, and has no flag for functions inside of
``torch.utils.checkpoint.checkpoint``. The stack is walked rarely: when a model is called while it seems to be running
already, and in the forward passes of probes and examples.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch.autograd import forward_ad

_has_gradients = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_task = torch._C._current_graph_task_id
_hooks = _autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
_profiled = _autograd._profiler_enabled  # pyright: ignore[reportAttributeAccessIssue]
_transforms = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]
_traced = torch._C._get_tracing_state


class _Outer(threading.local):
    """The backward pass that runs others inside of it, in this thread, and what is to be done when it ends."""

    def __init__(self) -> None:
        self.task = -1
        self.callbacks: list[Callable[[], None]] = []


_outer = _Outer()


def backward_task() -> int:
    """Return the number of the backward pass that is running, or -1."""
    return _task() if _outer.task == -1 else _outer.task


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call a function when the backward pass that is running has ended."""
    if _outer.task == -1:
        _queue(callback)
    else:
        _outer.callbacks.append(callback)


@contextmanager
def one_backward() -> Iterator[None]:
    """Let backward passes inside of the block count as a part of the one that is running."""
    if _outer.task != -1 or _task() == -1:
        yield
        return
    callbacks: list[Callable[[], None]] = []

    def end() -> None:
        for callback in callbacks:
            callback()

    _queue(end)
    _outer.task, _outer.callbacks = _task(), callbacks
    try:
        yield
    finally:
        _outer.task, _outer.callbacks = -1, []


def _queue(callback: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


class _Again(threading.local):
    """Whether this thread runs a module's code again, or on trial."""

    is_running = False


_again = _Again()


def runs_again() -> bool:
    """Say whether this thread runs a module's code again, or on trial: hooks that measure a step look away."""
    return _again.is_running


@contextmanager
def running_again() -> Iterator[None]:
    before, _again.is_running = _again.is_running, True
    try:
        yield
    finally:
        _again.is_running = before


def is_unwatched() -> bool:
    """Say whether a call records a graph, and nothing but autograd sees what it does or replaces what it saves.

    Not so in a compiler, a dispatch mode, a transform, a trace, a profiler, forward-mode differentiation, hooks for
    saved tensors (as those of activation checkpointing), a backward pass, and without gradients. Autocast does not
    count.
    """
    if torch.compiler.is_compiling():
        return False
    return (
        _has_gradients()
        and _task() == -1
        and not _dispatch_modes()
        and _hooks(False) is None
        and _transforms() is None
        and not _profiled()
        and forward_ad._current_level < 0
        and _traced() is None
    )


def has_saving_hooks() -> bool:
    return _hooks(False) is not None


def in_backward() -> bool:
    """Say whether a backward pass is running, as it is while activation checkpointing recomputes."""
    return torch._C._current_graph_task_id() != -1


def is_checkpointed() -> bool:
    """Say whether the innermost hooks for saved tensors are those of a non-reentrant checkpoint.

    It drops what is saved now, or saves it a second time. The first pass of a reentrant checkpoint runs without
    gradients, and cannot be told from other passes without them.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def next_node() -> int:
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


def running_node() -> int | None:
    """Return the number of the node whose backward pass is running, or None."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]


def is_called_inside_itself(module: nn.Module) -> bool:
    """Say whether a call of a module that has just begun is inside of another call of it that was not interrupted."""
    calls = [f for f in _frames() if f.f_code.co_name == "_call_impl" and f.f_locals.get("self") is module]
    return len(calls) > 1


def infers_shapes() -> bool:
    """Say whether the caller runs on numbers without a meaning, by which a pipeline's stages learn their shapes."""
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    return any(frame.f_code.co_name == "_forward_metadata_inference" for frame in _frames())


def in_checkpoint() -> bool:
    """Say whether the caller runs inside of a function that PyTorch's activation checkpointing will recompute."""
    return any(frame.f_globals.get("__name__") == "torch.utils.checkpoint" for frame in _frames())


def checkpoint_inputs() -> list[Tensor] | None:
    """Return the positional tensors of the ``torch.utils.checkpoint.checkpoint`` that the caller runs in, or None.

    They stay in memory until the backward pass.
    """
    frames = [frame for frame in _frames() if frame.f_globals.get("__name__") == "torch.utils.checkpoint"]
    given = [value for frame in frames for value in frame.f_locals.get("args", ())]
    return [value for value in given if isinstance(value, Tensor)] if frames else None


def _frames() -> Iterator[FrameType]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
