"""One step of a chain: run without a graph, recorded, or gone through backwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from rmm_linear.planning.replay.snapshots import differentiable, flatten, versions

Step = Callable[[int, Any], Any]


@dataclass
class Recorded:
    """A step with its graph: the leaves that it started from, and what it returned."""

    inputs: list[Tensor]
    outputs: list[Tensor]


class Stepper:
    """Runs ``step``, counts, and checks what it returns."""

    def __init__(self, step: Step, structure: TreeSpec) -> None:
        """Run nothing yet.

        Args:
            step: ``step(i, state) -> state``.
            structure: Structure of the state.
        """
        self.step, self.structure, self.count = step, structure, 0
        owner = getattr(step, "__self__", step)  # a method of a module, or a module
        self.module = owner if isinstance(owner, nn.Module) else None

    def run(self, number: int, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Run one step.

        Args:
            number: Which one.
            leaves: The state's tensors.

        Returns:
            The new state's tensors.

        Raises:
            TypeError: If step returns another structure.
            RuntimeError: If step changes the state in place.
        """
        self.count += 1
        before = versions(leaves)
        state = self.step(number, tree_unflatten(list(leaves), self.structure))
        if before != versions(leaves):
            raise RuntimeError(
                f"step must return a new state, but step {number} changed the old one in place, which is needed to run "
                "it again. Use operations without a trailing underscore, or clone what is changed."
            )
        found, structure = flatten(state, f"what step {number} returned")
        if structure != self.structure:
            raise TypeError(
                f"step must return a state of the structure that it got, {self.structure}, but step {number} returned "
                f"{structure}. Return all parts of the state, in the same containers."
            )
        return found

    def advance(self, number: int, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Run one step without a graph."""
        with torch.no_grad():
            return [leaf.detach() for leaf in self.run(number, leaves)]

    def record(self, number: int, leaves: Sequence[Tensor], needed: Sequence[bool] | None = None) -> Recorded:
        """Run one step with its graph.

        Args:
            number: Which one.
            leaves: The state's tensors.
            needed: Which of them need a gradient; None is all that can have one.

        Returns:
            The step.
        """
        needed = needed or [differentiable(leaf) for leaf in leaves]
        inputs = [leaf.detach().requires_grad_(need) for leaf, need in zip(leaves, needed, strict=True)]
        with torch.enable_grad():
            return Recorded(inputs, self.run(number, inputs))

    @contextlib.contextmanager
    def buffers_kept(self) -> Iterator[None]:
        """Leave the module's buffers as they were: running statistics count a step once, however often it runs."""
        buffers = [*self.module.buffers()] if self.module is not None else []
        before = [(buffer, buffer.clone()) for buffer in buffers]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, values in before:
                    if not torch.equal(buffer, values):  # version counters do not tell: batch_norm changes without
                        buffer.copy_(values)


def reached(recorded: Recorded, since: int | None = None) -> list[Tensor]:
    """Return the leaves, other than the state's, that a recorded step asks gradients for.

    Args:
        recorded: The step.
        since: Number of a node of this thread that was made before it; None does not look at that.

    Returns:
        The leaves.

    Raises:
        RuntimeError: If the step reaches a tensor that was computed outside of it, with a graph of its own.
    """
    known = {id(leaf) for leaf in recorded.inputs}
    found = {id(leaf): leaf for leaf in recorded.outputs if leaf.is_leaf and leaf.requires_grad}
    seen: set[Any] = set()
    todo = [leaf.grad_fn for leaf in recorded.outputs]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of a node that accumulates into a leaf
        if variable is not None:
            found[id(variable)] = variable
        elif since is not None and node._sequence_nr() <= since:
            raise RuntimeError(
                "A tensor that step captures and that needs a gradient must be a parameter, got the result of a "
                f"computation outside of step ({node.name()}). Compute it inside of step, or make it a part of the "
                "state."
            )
        todo.extend(following for following, _ in node.next_functions)
    return [leaf for key, leaf in found.items() if key not in known]


def go_back(
    recorded: Recorded,
    gradients: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    totals: Sequence[Tensor | None],
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Run one step backwards.

    The parameters' totals enter the graph as the gradient of one more use of each of them, later than the step's own:
    autograd then sums in the order in which it would for the whole chain, and rounds alike.

    Args:
        recorded: The step; its graph is used up.
        gradients: With respect to what it returned.
        parameters: The parameters.
        totals: Their gradients so far.

    Returns:
        The gradients with respect to what the step started from, and the new totals.
    """
    roots = [(o, g) for o, g in zip(recorded.outputs, gradients, strict=True) if g is not None and o.requires_grad]
    wanted = [leaf for leaf in recorded.inputs if leaf.requires_grad]
    if not roots or not (wanted or parameters):
        return [None] * len(recorded.inputs), list(totals)
    with torch.enable_grad():
        roots += [(p[...], total) for p, total in zip(parameters, totals, strict=True) if total is not None]
    ends, starts = zip(*roots, strict=True)
    with without_hooks(parameters):
        found = torch.autograd.grad(ends, [*wanted, *parameters], starts, allow_unused=True)
    of_inputs = iter(found[: len(wanted)])
    return [next(of_inputs) if leaf.requires_grad else None for leaf in recorded.inputs], list(found[len(wanted) :])


@contextlib.contextmanager
def without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Keep hooks of parameters from seeing the gradient of each step: the sum passes them once, at the end."""
    hooks = [(p._backward_hooks, dict(p._backward_hooks)) for p in parameters if p._backward_hooks]
    try:
        for registered, _ in hooks:
            registered.clear()
        yield
    finally:
        for registered, saved in hooks:
            registered.update(saved)
