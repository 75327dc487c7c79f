"""A backend for torch.compile that recomputes pieces of each graph, so that a step fits into a memory budget."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from rmm_linear.planning.graph_plan import GraphPlan, fingerprint
from rmm_linear.planning.plan_graph import plan_captured

_logger = logging.getLogger(__name__)


class Backend:
    """Plans every graph that torch.compile captures, once per graph and shape."""

    def __init__(self, memory: int | float | str, method: str = "cuts", known: Iterable[GraphPlan] = ()) -> None:
        """Begin with the plans that are known.

        Args:
            memory: The budget, as for :func:`rmm_linear.planning.plan_graph`.
            method: As for :func:`rmm_linear.planning.plan_graph`.
            known: Plans of graphs that need not be planned.
        """
        self.memory = memory
        self.method = method
        self.plans = {plan.graph: plan for plan in known}

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Plan a graph.

        Args:
            graph: The graph.
            inputs: Its inputs.

        Returns:
            What runs in its place.
        """
        key = fingerprint(graph, inputs)
        if key not in self.plans:
            self.plans[key] = plan_captured(graph, inputs, self.memory, self.method)
            _logger.info("%s", self.plans[key].summary())
            if len(self.plans) == 2:
                _logger.warning(
                    "The model has several graphs or shapes; each is planned for the whole budget. Where a graph "
                    "breaks, planning.plan_blocks() plans the whole model."
                )
        return self.plans[key].run(graph, inputs)


def backend(memory: int | float | str, method: str = "cuts") -> Backend:
    """Return a backend for torch.compile that keeps a training step within a memory budget.

    Args:
        memory: Budget for what a step makes: bytes, a text such as "2GB", or a share of the plain peak in (0, 1].
        method: As for :func:`rmm_linear.planning.plan_graph`.

    Returns:
        The backend: ``torch.compile(model, backend=planning.backend(memory="2GB"))``.
    """
    return Backend(memory, method)
