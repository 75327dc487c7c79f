"""A backend for torch.compile that recomputes pieces of each graph, so that a step fits into a memory budget."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from rmm_linear.planning.graphs.block_pieces import block_pieces
from rmm_linear.planning.graphs.capture import check_graph
from rmm_linear.planning.graphs.plan import GraphPlan, fingerprint
from rmm_linear.planning.graphs.plan_graph import plan_captured
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
        """Begin with the plans that are known.

        Args:
            memory: The budget, as for :func:`rmm_linear.planning.plan_graph`.
            method: As for :func:`rmm_linear.planning.plan_graph`; "keep" leaves graphs that are not known as they are.
            known: Plans of graphs that need not be planned.
            workspace: As for :func:`rmm_linear.planning.plan_graph`.
        """
        self.memory = memory
        self.method = method
        self.workspace = workspace
        self.plans = {plan.graph: plan for plan in known}
        self.breaks = ""  # why the model is no single graph

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Plan a graph.

        Args:
            graph: The graph.
            inputs: Its inputs.

        Returns:
            What runs in its place.
        """
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
                "The model is no single graph, so its graphs share no budget and memory=%r is not kept: %s. Instead, "
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
