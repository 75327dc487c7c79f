"""Measure what every node of a model's graph costs in a training step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from rmm_linear.planning.graphs.capture import capture
from rmm_linear.planning.graphs.costs import GraphCosts
from rmm_linear.planning.graphs.record import graph_costs
from rmm_linear.planning.step.clock import Clock
from rmm_linear.planning.step.step import as_in_training, copied


@dataclass(frozen=True)
class NodeCost:
    """A node of a graph in one training step.

    Attributes:
        name: The node.
        module: The innermost module that it belongs to.
        storages: Bytes of the storages that it is the first to save, largest first.
        transient: Bytes of the storages that it makes and that no node saves.
        flops: Operations of its forward pass.
        seconds: Time of its forward pass; nodes that do the same on the same shapes have the same.
        random: Whether it draws random numbers.
        writes: Whether it changes something in place.
    """

    name: str
    module: str
    storages: tuple[int, ...]
    transient: int
    flops: int
    seconds: float
    random: bool
    writes: bool


def measure_nodes(model: nn.Module, example: Any) -> tuple[NodeCost, ...]:
    graph, inputs = capture(model, example)
    costs = graph_costs(graph, inputs)
    with as_in_training(model), torch.no_grad():
        seconds = _times(Clock(model, [node.name for node in costs.nodes]), costs, inputs)
    rows, made_by = list[NodeCost](), costs.made_by()
    for place, node in enumerate(costs.nodes):
        first = [key for key in costs.saved[place] if costs.saver[key] == place]
        rows.append(
            NodeCost(
                node.name,
                _module(node),
                tuple(sorted((costs.size[key] for key in first), reverse=True)),
                sum(costs.size[key] for key in made_by[place] if key not in costs.saver),
                costs.flops[place],
                seconds[place],
                costs.random[place],
                place in costs.writing,
            )
        )
    return tuple(rows)


def _module(node: fx.Node) -> str:
    """Return the innermost module's name, as ``named_modules`` has it."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = stack[-1][0] if stack else ""
    return re.sub(r"^L\['\w+'\]", "", path).replace("._modules", "").replace("['", ".").replace("']", "").strip(".")


def _times(clock: Clock, costs: GraphCosts, inputs: Sequence[Any]) -> list[float]:
    runs = []
    for _ in range(2):  # the less of two
        timed = _Timed(costs.graph, clock)
        timed.run(*(each if isinstance(each, nn.Parameter) else copied(each) for each in inputs))
        runs.append(clock.sums([span for span in timed.spans if span[0] in clock.names]))
    kinds = [f"{node.target} {[_shape(each) for each in node.all_input_nodes]}" for node in costs.nodes]
    by_kind: dict[str, list[float]] = {}
    for node, kind in zip(costs.nodes, kinds, strict=True):
        by_kind.setdefault(kind, []).append(min(seconds[node.name] for seconds in runs))
    return [sum(by_kind[kind]) / len(by_kind[kind]) for kind in kinds]


def _shape(node: fx.Node) -> Any:
    value = node.meta.get("example_value")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


class _Timed(fx.Interpreter):
    """Runs a graph on real tensors, and reads the clock around every node."""

    def __init__(self, graph: fx.GraphModule, clock: Clock) -> None:
        super().__init__(graph)
        self.clock = clock
        self.spans: list[tuple[str, Any, Any]] = []

    def run_node(self, n: fx.Node) -> Any:
        begin = self.clock.now()
        result = super().run_node(n)
        self.spans.append((n.name, begin, self.clock.now()))
        return result
