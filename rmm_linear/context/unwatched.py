"""Say whether nothing but autograd sees a call, so that it may do no more than it must."""

from __future__ import annotations

import torch
from torch._C import _autograd
from torch.autograd import forward_ad

_mode = torch.is_grad_enabled
_modes = torch._C._len_torch_dispatch_stack
_task = torch._C._current_graph_task_id
_hooks = _autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
_profiled = _autograd._profiler_enabled  # pyright: ignore[reportAttributeAccessIssue]
_transforms = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]
_traced = torch._C._get_tracing_state


def is_unwatched() -> bool:
    """Say whether a call records a graph, and nothing beside autograd sees what it does or replaces what it saves.

    Returns:
        False in a compiler, a dispatch mode, a transform, a trace, a profiler, forward-mode differentiation, hooks for
        saved tensors (as those of activation checkpointing), a backward pass, and without gradients.
    """
    if torch.compiler.is_compiling():
        return False
    return (
        _mode()
        and _task() == -1
        and not _modes()
        and _hooks(False) is None
        and _transforms() is None
        and not _profiled()
        and forward_ad._current_level < 0
        and _traced() is None
    )


def has_saving_hooks() -> bool:
    """Say whether hooks get what autograd saves."""
    return _hooks(False) is not None
