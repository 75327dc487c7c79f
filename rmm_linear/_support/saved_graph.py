"""Walk autograd graphs, and read what their nodes have saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


def nodes_behind(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes of the graph behind some nodes or None, these first, in the same order in every process."""
    todo = [*dict.fromkeys(node for node in roots if node is not None)]
    yield from todo
    seen = set(todo)
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                todo.append(node)
                yield node


def graph_leaves(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors for which a backward pass from here would accumulate a gradient."""
    return [node.variable for node in nodes_behind(one.grad_fn for one in outputs) if hasattr(node, "variable")]


def saved_in_graph(output: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yield the nodes behind an output, each with a tensor that it has saved.

    Of what activation checkpointing would recompute to show it, there is none.
    """
    with torch._C.DisableTorchFunctionSubclass():  # logits that are computed when they are read are not read
        roots = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    for node in nodes_behind(roots):
        for attribute in dir(node):
            if attribute.startswith("_saved_") or attribute == "saved_tensors":
                yield from ((node, leaf) for leaf in tree_leaves(_read(node, attribute)) if isinstance(leaf, Tensor))


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
