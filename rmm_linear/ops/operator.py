"""Operators of PyTorch, which eager code calls as plain functions where nothing would notice.

PyTorch's dispatcher takes some fifty microseconds for an operator in Python, more than a small layer. What needs the
operator is a compiler, a mode that sees every operator (fake tensors, selective checkpointing, counters of operations),
a profiler, and tensors that are more than memory. Anything else gets the same from the function itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)


class Operator:
    """An operator in the namespace ``rmm_linear``, and the function that it runs.

    Attributes:
        function: The function.
        definition: The operator.
    """

    def __init__(self, name: str, function: Callable[..., Any], schema: str | None = None) -> None:
        """Register the operator.

        Args:
            name: Its name.
            function: What it runs; it changes none of its arguments and returns none of their memory.
            schema: Its schema, or None for that of the function's annotations.
        """
        self.function, self.__doc__, self.__name__ = function, function.__doc__, function.__name__
        self.definition = torch.library.custom_op(f"rmm_linear::{name}", function, mutates_args=(), schema=schema)
        self.register_fake = self.definition.register_fake

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the function, as an operator where something may see it as one.

        Args:
            *arguments: Those of the schema, all tensors among them.
            **named: As well; no tensors.

        Returns:
            What the function returns.
        """
        return (self.function if _is_unseen(arguments) else self.definition)(*arguments, **named)


def _is_unseen(arguments: tuple[Any, ...]) -> bool:
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._autograd._profiler_enabled():  # pyright: ignore[reportAttributeAccessIssue]
        return False
    for value in arguments:  # noqa: SIM110 - all() takes twice as long, in every call of every layer
        if isinstance(value, Tensor) and type(value) not in _PLAIN:
            return False
    return True


def operator(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Operator]:
    """Return a decorator that makes an operator of a function.

    Args:
        name: Name of the operator.
        schema: See :class:`Operator`.

    Returns:
        The decorator.
    """
    return lambda function: Operator(name, function, schema)
