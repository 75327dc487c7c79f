"""One step of a chain: run without a graph, recorded, or gone through backwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from rmm_linear._support.saved_graph import nodes_behind
from rmm_linear.planning.replay.reached import leaves_behind, pull_back
from rmm_linear.planning.replay.replayed import modules_behind, versions
from rmm_linear.planning.replay.snapshots import flatten, is_differentiable

Step = Callable[[int, Any], Any]


@dataclass
class RecordedStep:
    """A step with its graph: the leaves that it started from, and what it returned."""

    inputs: list[Tensor]
    outputs: list[Tensor]


class Stepper:
    """Runs ``step``, counts, and checks what it returns."""

    def __init__(self, step: Step, structure: TreeSpec) -> None:
        self.step, self.structure, self.count = step, structure, 0
        owner = getattr(step, "__self__", step)  # a method of a module, or a module
        self.module = owner if isinstance(owner, nn.Module) else None
        self.modules = modules_behind(step)

    def run(self, number: int, leaves: Sequence[Tensor]) -> list[Tensor]:
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

    def record(self, number: int, leaves: Sequence[Tensor], needed: Sequence[bool] | None = None) -> RecordedStep:
        needed = needed or [is_differentiable(leaf) for leaf in leaves]
        inputs = [leaf.detach().requires_grad_(need) for leaf, need in zip(leaves, needed, strict=True)]
        with torch.enable_grad():
            return RecordedStep(inputs, self.run(number, inputs))


def reached(recorded: RecordedStep, since: int | None = None) -> list[Tensor]:
    """Return the leaves, other than the state's, that a recorded step asks gradients for.

    ``since`` is the number of a node of this thread that was made before it; None does not look at that.
    """
    for node in nodes_behind(one.grad_fn for one in recorded.outputs) if since is not None else ():
        if not hasattr(node, "variable") and node._sequence_nr() <= since:
            raise RuntimeError(
                "A tensor that step captures and that needs a gradient must be a parameter, got the result of a "
                f"computation outside of step ({node.name()}). Compute it inside of step, or make it a part of the "
                "state."
            )
    return leaves_behind(recorded.outputs, recorded.inputs)


def go_back(
    recorded: RecordedStep,
    gradients: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    totals: Sequence[Tensor | None],
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    results = [(o, g) for o, g in zip(recorded.outputs, gradients, strict=True) if g is not None and o.requires_grad]
    with without_hooks(parameters):
        found, totals = pull_back(results, [one for one in recorded.inputs if one.requires_grad], parameters, totals)
    of_inputs = iter(found)
    return [next(of_inputs) if leaf.requires_grad else None for leaf in recorded.inputs], totals


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
