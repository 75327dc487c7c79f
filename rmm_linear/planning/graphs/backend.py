"""A backend for torch.compile that recomputes pieces of each graph, so that a step fits into a memory budget."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from rmm_linear._support.validation import did_you_mean
from rmm_linear.planning.budget import check_model, read_budget
from rmm_linear.planning.graphs.capture import check_graph
from rmm_linear.planning.graphs.pieces import graph_flops, run_in_pieces, simulate_graph
from rmm_linear.planning.graphs.plan import METHODS, GraphPlan, fingerprint, planned_pieces
from rmm_linear.planning.graphs.plan_graph import plan_captured
from rmm_linear.planning.graphs.record import graph_costs
from rmm_linear.planning.plans import Applied, apply
from rmm_linear.planning.step.flops import by_plain
from rmm_linear.planning.step.workspace import Workspace

_logger = logging.getLogger(__name__)


class Backend:
    """Plans every graph that torch.compile captures, once per graph and shape."""

    def __init__(
        self,
        memory: int | float | str,
        method: str = "cuts",
        known: Iterable[GraphPlan] = (),
        workspace: Workspace | None = None,
    ) -> None:
        """Begin with the plans that are known; others as of ``plan_graph``, "keep" leaves graphs as they are."""
        if method not in (*METHODS, "keep"):
            raise ValueError(
                f"method must be one of {', '.join(METHODS)}, got {method!r}.{did_you_mean(method, METHODS)}"
            )
        read_budget(memory, 1)  # says at once if it is none
        self.memory = memory
        self.method = method
        self.workspace = workspace
        self.plans = {plan.graph: plan for plan in known}
        self.breaks = ""  # why the model is no single graph

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        check_graph(graph)
        is_trained = any(isinstance(each, Tensor) and each.requires_grad for each in inputs)
        if not (torch.is_grad_enabled() and is_trained):
            return graph
        key = fingerprint(graph, inputs)
        if key not in self.plans and self.method == "keep":
            _logger.info("A graph of another shape than the reordered one runs as it is.")
            return graph
        if key not in self.plans:
            self.plans[key] = self._plan(graph, inputs)
            _logger.info("%s", self.plans[key].summary())
        return self.plans[key].run(graph, inputs)

    def _plan(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> GraphPlan:
        found = _why_no_single_graph(graph)
        if found and not self.breaks:
            self.breaks = found
            _logger.warning(
                "The model is no single graph, so its graphs share no budget and memory=%r is not met: %s. Instead, "
                "every block of the module tree is recomputed. planning.plan_blocks(model, example, memory) plans the "
                "whole model and needs no graph.",
                self.memory,
                self.breaks,
            )
        if self.breaks:
            return block_pieces(graph, inputs)
        return plan_captured(graph, inputs, self.memory, self.method, self.workspace)


def _why_no_single_graph(graph: fx.GraphModule) -> str:
    """Say where dynamo ended the graph before the model ended; empty if it did not."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    if getattr(reason, "graph_break", False):
        stack, lines = getattr(reason, "user_stack", None), str(getattr(reason, "reason", "")).strip().splitlines()
        line = f" at {stack[-1].filename}:{stack[-1].lineno}" if stack else ""
        return f"{lines[0].rstrip('.') if lines else 'a graph break'}{line}"
    frame, found = sys._getframe(1), ""
    while frame.f_back is not None and Path(frame.f_code.co_filename).name != "eval_frame.py":
        name, code = frame.f_globals.get("__name__", ""), frame.f_code
        if not found and name.partition(".")[0] != "torch" and not name.startswith("rmm_linear.planning."):
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            caller = f"{type(owner).__name__}.{code.co_name}" if isinstance(owner, nn.Module) else code.co_name
            found = f"{caller} runs without a graph at {code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return found


def backend(memory: int | float | str, method: str = "cuts") -> Backend:
    """Return a backend for torch.compile that keeps a training step within a memory budget.

    Every graph is planned when it is captured, once per shape. Where a model is no single graph, there is no budget for
    all: every block of the module tree is recomputed then, and a warning says where the graph breaks, and why. Graphs
    that need no gradient, as those of an evaluation, run as they are. dynamo captures 8 shapes of a model and no more,
    unless ``torch._dynamo.config.recompile_limit`` says otherwise.

    Args:
        memory: Budget for what a step makes, as for :func:`rmm_linear.planning.plan_graph`.
        method: As for :func:`rmm_linear.planning.plan_graph`.

    Returns:
        The backend, for one model: ``torch.compile(model, backend=planning.backend(memory="2GB"))``.
    """
    return Backend(memory, method)


@apply.register
def apply_graph(plan: GraphPlan, model: nn.Module) -> Applied:
    """Make a model that trains by a plan; see :meth:`GraphPlan.apply`."""
    check_model(model)
    if plan.method == "blocks":
        raise ValueError("The plan is of one graph of several and cannot be applied to a model. Use plan_blocks().")
    method = "keep" if plan.method == "order" else plan.method
    made = Backend(plan.asked or plan.memory, method, known=[plan], workspace=plan._workspace)
    plan.made_for(model, plan._workspace)
    return Applied(plan, torch.compile(model, backend=made, dynamic=False))


def block_pieces(graph: fx.GraphModule, inputs: Sequence[Any]) -> GraphPlan:
    """Plan a graph in which every entry of a list of modules is recomputed; all of it, if it shows none."""
    # Graphs that come after this one are not known, so its last block is recomputed too.
    costs = graph_costs(graph, inputs)
    legal = {0, *costs.legal_cuts()}
    blocks = blocks_of(costs.nodes)
    changes = [0, *(place for place in range(1, costs.count) if blocks[place] != blocks[place - 1])]
    begins = sorted({next((cut for cut in range(place, costs.count) if cut in legal), 0) for place in changes} | {0})
    part, recomputed = [0] * costs.count, set[int]()
    for number, (begin, end) in enumerate(pairwise([*begins, costs.count])):
        part[begin:end] = [number] * (end - begin)
        if any(blocks[begin:end]) or not any(blocks):
            recomputed.add(number)
    run = run_in_pieces(costs, part, recomputed)
    plain, peak = simulate_graph(costs, graph).bytes, simulate_graph(costs, run).bytes
    flops = by_plain(graph_flops(costs, run), graph_flops(costs, graph))
    pieces = planned_pieces(costs, part, recomputed)
    return GraphPlan("blocks", fingerprint(graph, inputs), part, sorted(recomputed), pieces, 0, peak, plain, flops)


def blocks_of(nodes: Sequence[fx.Node]) -> list[str]:
    """By node: dynamo's name of the outermost entry of a list of modules, with modules inside, that it belongs to."""
    paths = [[path for path, _ in node.meta.get("nn_module_stack", {}).values()] for node in nodes]
    inside = {outer for path in paths for outer in path[:-1]}
    entries = {path for path in inside if re.search(r"(\['\d+'\]|\[\d+\]|\.\d+)$", path)}
    return [next((each for each in path if each in entries), "") for path in paths]
