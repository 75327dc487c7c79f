"""Run converted modules on slices of what the model gives them: masks and patterns of whole sequences do not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from rmm_linear.context.call_inputs import CallInputs
from rmm_linear.context.learned import GradientRows


@contextmanager
def unmasked(modules: Sequence[Any]) -> Iterator[None]:
    """Let converted modules save all rows of what they are given inside of the block."""
    contexts = {id(one.rmm_context): one.rmm_context for one in modules if one.rmm_context is not None}
    for module in modules:
        context = module.rmm_context
        if context is not None and isinstance(context.learned.get(module.rmm_index), GradientRows):
            del context.learned[module.rmm_index]
    with ExitStack() as stack:
        for context in contexts.values():
            running = context._running.inputs
            if running:
                running.append(CallInputs())
                stack.callback(running.pop)
        yield
