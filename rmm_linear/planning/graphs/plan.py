"""A plan for a captured graph, as data: print it, save it, apply it, revert it."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, fx, nn

from rmm_linear._support.fields import check_least, read_fields
from rmm_linear._support.sizes import show_bytes
from rmm_linear._support.tables import keyed, table
from rmm_linear.memory.peak import Peak
from rmm_linear.planning.budget import read_budget
from rmm_linear.planning.graphs.capture import capture
from rmm_linear.planning.graphs.costs import GraphCosts
from rmm_linear.planning.graphs.pieces import run_in_pieces, simulate_graph
from rmm_linear.planning.graphs.record import graph_costs
from rmm_linear.planning.plans import Plan, apply
from rmm_linear.planning.step.workspace import Workspace

METHODS = ("cuts", "chen", "kusumoto", "kusumoto-exact")
_SHOWN = 24  # pieces of a plan that is printed in short


@dataclass(frozen=True)
class PlannedPiece:
    """A piece of a graph.

    Attributes:
        first: Name of its first node.
        last: Name of its last node.
        nodes: Number of its nodes.
        choice: "keep" or "recompute".
        saved: Bytes that its nodes save for the backward pass if it is not recomputed.
        seconds: A rough time of its forward pass.
    """

    first: str
    last: str
    nodes: int
    choice: str
    saved: int
    seconds: float


@dataclass(frozen=True, repr=False)
class GraphPlan(Plan):
    """The pieces of a captured graph, and which of them are recomputed in the backward pass.

    Attributes:
        method: How it was found: "cuts", "chen", "kusumoto", "kusumoto-exact", "order"; "blocks" where graphs break.
        graph: Fingerprint of the graph.
        part: By node: the number of its part.
        recomputed: Numbers of the parts that are recomputed.
        pieces: The parts, for the reader.
        memory: The budget in bytes; 0 where there is none.
        predicted: Peak of a step with the plan, simulated.
        plain: Peak of a step without it, simulated.
        flops: Operations of a step, relative to one without the plan.
        order: The nodes in the order in which they run; empty if that is the graph's own.
        asked: The budget as it was given, by which graphs of other shapes are planned.
    """

    FORMAT: ClassVar[str] = "rmm_linear graph plan 1"

    method: str
    graph: str
    part: Sequence[int]
    recomputed: Sequence[int]
    pieces: Sequence[PlannedPiece]
    memory: int = 0
    predicted: int = 0
    plain: int = 0
    flops: float = 1.0
    order: Sequence[int] = ()
    asked: int | float | str = 0

    def __post_init__(self) -> None:
        for name in ("part", "recomputed", "pieces", "order"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def __str__(self) -> str:
        return self._text(_SHOWN)

    def table(self) -> str:
        """Return a row for every piece.

        Returns:
            Text.
        """
        return self._text(len(self.pieces))

    def _text(self, most: int) -> str:
        header = ("piece", "nodes", "choice", "saved", "seconds")
        rows = [
            (f"{one.first} … {one.last}", str(one.nodes), one.choice, show_bytes(one.saved), f"{one.seconds:.2g}")
            for one in self.pieces
        ]
        more = f"\nand {len(rows) - most} more pieces, see table()" if len(rows) > most else ""
        return f"{self.summary()}\n{table(header, rows[:most])}{more}"

    def _records(self) -> list[dict[str, Any]]:
        return [asdict(piece) for piece in self.pieces]

    def summary(self) -> str:
        """Return the plan in one line, or two of 100 columns."""
        budget = f"budget {show_bytes(self.memory)}," if self.memory else "no budget,"
        counts = (f"method={self.method}", f"pieces={len(self.pieces)}", f"recompute={len(self.recomputed)}")
        peak = f"peak {show_bytes(self.predicted)} of {show_bytes(self.plain)},"
        return keyed("rmm_linear plan:", (*counts, peak, budget, f"operations × {self.flops:.3f}"))

    @property
    def seconds(self) -> float:
        """A rough time that is added to a step."""
        return sum(piece.seconds for piece in self.pieces if piece.choice == "recompute")

    def run(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
        """Return a captured graph in the plan's pieces."""
        self.check(graph, inputs)
        return self.of(graph_costs(graph, inputs))

    def of(self, costs: GraphCosts) -> fx.GraphModule:
        """Return the measured graph in the plan's pieces.

        Args:
            costs: Of the graph.

        Returns:
            A module with the same inputs and outputs.
        """
        return run_in_pieces(costs, self.part, set(self.recomputed), self.order)

    def simulated(self, example: Any, workspace: Workspace | None = None) -> Peak:
        """Return the peak of a step with the plan, as :func:`rmm_linear.planning.simulate` does.

        Args:
            example: A training batch of the planned shape.
            workspace: Bytes that operators take beyond their results.

        Returns:
            The peak, whose modules are pieces.

        Raises:
            ValueError: If the plan has no model, or is of another graph.
        """
        graph, inputs = capture(self._given(), example)
        self.check(graph, inputs)
        costs = graph_costs(graph, inputs)
        peak = simulate_graph(costs, self.of(costs), workspace)
        names = {
            str(number): f"{piece.first} … {piece.last}"
            for number, piece in zip(sorted(set(self.part)), self.pieces, strict=True)
        }

        def named(text: str) -> str:
            return re.sub(r"submod_(\d+)(\.piece)?", lambda found: names[found[1]], text)

        peak.moment, peak.alive = named(peak.moment), [replace(one, module=named(one.module)) for one in peak.alive]
        peak.timeline = [(size, named(moment)) for size, moment in peak.timeline]
        return peak

    def apply(self, model: nn.Module | None = None) -> Any:
        """Return the model to train, which shares its parameters with the given one.

        Args:
            model: The planned model; None is the one that the plan was made for.

        Returns:
            The model, compiled by torch.compile's front end alone: its operators are PyTorch's own. Graphs of other
            shapes than the planned one are planned again for the same budget.

        Raises:
            ValueError: If the plan has no model, or is of a graph after a graph break.
        """
        return apply(self, self._given(model)).model

    def revert(self) -> nn.Module | None:
        """Return the model itself, which the plan has not changed."""
        return self._model

    def check(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Check that a graph is the planned one.

        Args:
            graph: A captured graph.
            inputs: Its inputs.

        Raises:
            ValueError: If it is another one.
        """
        if fingerprint(graph, inputs) != self.graph:
            raise ValueError("The plan is of another graph: the model or the shapes differ. Plan it with plan_graph().")

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON types.

        Returns:
            Its fields.
        """
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {"format": self.FORMAT, **fields}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> GraphPlan:
        """Make a plan of what :meth:`to_dict` returned, the format left out.

        Args:
            fields: Plain JSON types.

        Returns:
            The plan.

        Raises:
            ValueError: If a field is missing, has a wrong type or value, or contradicts another.
        """
        plan = read_fields(cls, fields)
        check_least(plan, 0, "memory", "predicted", "plain", "flops")
        if plan.method not in (*METHODS, "order", "blocks"):
            raise ValueError(f"method must be one of {', '.join((*METHODS, 'order', 'blocks'))}, got {plan.method!r}")
        if not re.fullmatch("[0-9a-f]{16}", plan.graph):
            raise ValueError(f"graph must be a fingerprint of 16 hexadecimal digits, got {plan.graph!r}")
        if plan.asked != 0:
            read_budget(plan.asked, 1)
        count, nodes = len(plan.pieces), len(plan.part)
        if {*plan.part} != {*range(count)} or not {*plan.recomputed} <= {*range(count)}:
            raise ValueError(f"part and recomputed must number the {count} pieces, got {plan.recomputed} recomputed")
        recomputed, sizes = {*plan.recomputed}, Counter(plan.part)
        for number, piece in enumerate(plan.pieces):
            check_least(piece, 0, "saved", "seconds")
            does = "recompute" if number in recomputed else "keep"
            if piece.choice != does or piece.nodes != sizes[number]:
                raise ValueError(f"piece {number} must {does} {sizes[number]} nodes, got {piece}")
        if plan.order and sorted(plan.order) != [*range(nodes)]:
            raise ValueError(f"order must have each of the {nodes} nodes once, got {len(plan.order)} numbers")
        return plan


def planned_pieces(costs: GraphCosts, part: Sequence[int], recomputed: set[int]) -> list[PlannedPiece]:
    rows, seconds = [], costs.seconds
    for number in sorted(set(part)):
        places = [place for place, one in enumerate(part) if one == number]
        keys = set().union(*(costs.saved[place] for place in places))
        saved = sum(costs.size[key] for key in keys if part[costs.made[key]] == number)
        rows.append(
            PlannedPiece(
                costs.nodes[places[0]].name,
                costs.nodes[places[-1]].name,
                len(places),
                "recompute" if number in recomputed else "keep",
                saved,
                sum(seconds[place] for place in places),
            )
        )
    return rows


def fingerprint(graph: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Return what tells a graph and its shapes from others."""
    nodes = [f"{node.op} {node.name} {_name(node.target)} {node.args} {node.kwargs}" for node in graph.graph.nodes]
    shapes = [(tuple(each.shape), str(each.dtype), each.requires_grad) for each in inputs if isinstance(each, Tensor)]
    return hashlib.sha256(repr((nodes, shapes)).encode()).hexdigest()[:16]


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__qualname__", str(target))
