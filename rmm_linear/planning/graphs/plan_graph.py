"""Plan which pieces of a captured graph are recomputed: several methods propose, the simulation judges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from rmm_linear._support.progress import end_stage, expect, reporting, stage, took
from rmm_linear._support.validation import did_you_mean
from rmm_linear.planning.budget import LEAST, BudgetError, check_model, read_budget, shown_budget, shown_least
from rmm_linear.planning.graphs.capture import capture
from rmm_linear.planning.graphs.pieces import graph_flops, run_in_pieces, simulate_graph
from rmm_linear.planning.graphs.plan import METHODS, GraphPlan, fingerprint, planned_pieces
from rmm_linear.planning.graphs.record import graph_costs
from rmm_linear.planning.graphs.search import Search
from rmm_linear.planning.step.flops import by_plain
from rmm_linear.planning.step.watch import SIMULATING
from rmm_linear.planning.step.workspace import Workspace

_JUDGED = 20.0  # steps that are simulated, or take as long: proposals are looked for meanwhile


def plan_graph(
    model: nn.Module,
    example: Any,
    memory: int | float | str,
    *,
    method: str = "cuts",
    workspace: Workspace | None = None,
    progress: bool | None = None,
) -> GraphPlan:
    """Plan which pieces of a model's graph are recomputed, so that a step fits into a memory budget.

    The graph is captured by torch.compile's front end; nothing is compiled. Loss, gradients and buffers stay those of
    the model to the bit. Pieces may begin and end between any two operators, so networks without a list of like blocks,
    convolutional ones above all, save more than with :func:`rmm_linear.planning.plan_blocks`.

    Args:
        model: The model, in training mode.
        example: A training batch, as for :func:`rmm_linear.planning.simulate`. The graph must be a single one.
        memory: Budget for what a step makes: bytes, a text such as "2GB", or a share of the plain peak in (0, 1];
            "least" is the lowest peak that is found, whatever time it takes.
        method: "cuts": ours, over cuts of the order of execution, or the best of the others where they are better;
            "chen": segments of about the same size, all but the last recomputed; "kusumoto": the dynamic program over
            the lower sets of every node; "kusumoto-exact": over all lower sets, which suits small graphs.
        workspace: Bytes that operators take beyond their results, of :func:`rmm_linear.planning.workspace`, so that it
            counts too; None leaves it out.
        progress: As for :func:`rmm_linear.fit`.

    Returns:
        The plan; ``plan.apply()`` returns the model to train.

    Raises:
        ValueError: If nothing fits, with the least budget that was found; if the method is unknown; or if the model is
            no single graph, with the line.

    Example:
        >>> import torch
        >>> model = nn.Sequential(*(each for _ in range(12) for each in (nn.Linear(64, 64), nn.Tanh())))
        >>> plan = plan_graph(model, torch.ones(1000, 64), memory=0.7)
        >>> plan.predicted <= 0.7 * plan.plain
        True
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.{did_you_mean(method, METHODS)}")
    check_model(model)
    with reporting("plan_graph", progress):
        stage("capturing the graph")
        graph, inputs = capture(model, example)
        return plan_captured(graph, inputs, memory, method, workspace).made_for(model, workspace)


def plan_captured(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    memory: int | float | str,
    method: str,
    workspace: Workspace | None = None,
) -> GraphPlan:
    stage("measuring its nodes")
    costs = graph_costs(graph, inputs)
    stage(SIMULATING)
    plain = simulate_graph(costs, graph, workspace).bytes
    end_stage()
    budget = read_budget(memory, plain)
    search = Search(costs, plain, workspace)
    methods = () if plain <= budget else (method,) if method != "cuts" else ("cuts", "chen", "kusumoto")
    if methods and (seconds := took(SIMULATING)):
        expect(_JUDGED, _JUDGED * seconds, of="simulated steps")
    for each in methods:
        stage(f"proposing by {each}")
        search.propose(each, budget)
    best = search.smallest() if memory == LEAST or plain <= budget else search.best(budget)
    if best is None:
        smallest, least = search.smallest()
        raise BudgetError(
            f"memory={shown_budget(memory, plain)} cannot be met with method={method!r}: the least found is "
            f"{shown_least(least, plain)}, in {len(set(smallest.parts[0]))} pieces. Use more memory, or a smaller "
            "batch."
        )
    proposal, predicted = best
    part, recomputed = proposal.parts
    flops = 1.0
    if recomputed:
        flops = by_plain(graph_flops(costs, run_in_pieces(costs, part, recomputed)), graph_flops(costs, graph))
    return GraphPlan(
        proposal.method if recomputed else method,
        fingerprint(graph, inputs),
        part,
        sorted(recomputed),
        planned_pieces(costs, part, recomputed),
        budget or predicted,
        predicted,
        plain,
        flops,
        asked=memory,
    )
