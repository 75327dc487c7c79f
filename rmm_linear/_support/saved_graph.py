"""Read what the nodes of an autograd graph have saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


def saved_in_graph(output: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yield the nodes behind an output, each with a tensor that it has saved.

    Of what activation checkpointing would recompute to show it, there is none.
    """
    with torch._C.DisableTorchFunctionSubclass():  # logits that are computed when they are read are not read
        roots = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    todo = [node for node in roots if node is not None]
    seen = set(todo)
    while todo:
        node: Any = todo.pop()
        for attribute in dir(node):
            if attribute.startswith("_saved_") or attribute == "saved_tensors":
                yield from ((node, leaf) for leaf in tree_leaves(_read(node, attribute)) if isinstance(leaf, Tensor))
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                todo.append(parent)


def _read(node: Any, attribute: str) -> Any:
    try:
        with _NoRecomputation():
            return getattr(node, attribute)
    except RuntimeError:  # distributed tensors turn ours into another one
        return ()


class _RecomputationError(RuntimeError):
    pass


class _NoRecomputation(TorchFunctionMode):
    """Lets no function of PyTorch run: reading what is in memory calls none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _RecomputationError
