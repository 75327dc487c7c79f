"""Plans for whole networks.

Peaks are counted and operations too, so the machine matters only to the allocator's peaks and to the time of planning.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.figures import figure_of
from benchmarks.library import Workspace, allocator_peak, capture, graph_step, run_step
from benchmarks.planning.compiled import Compiled, compiled, decoders
from benchmarks.planning.networks import large, small
from benchmarks.records import Origin, add_choices, add_output, origin, show, write_rows
from rmm_linear.memory import peak
from rmm_linear.planning import GraphPlan, order, plan_graph, plot_memory, simulate, workspace

METHODS = ("cuts", "chen", "kusumoto")
_PICTURED = "U-Net"
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Planned(Origin):
    """One network with one plan."""

    part: str  # "real" for networks that run, "paper" for those that are simulated only, "order" for other orders
    network: str  # title, with the batch
    method: str  # how the plan was found, or "plain"
    found: str = ""  # which method proposed it, for "cuts"
    nodes: int = 0  # of the graph
    recomputed: int = 0  # pieces that are recomputed
    predicted: int = 0  # peak in the simulation, bytes, with the gradients of the parameters
    with_workspace: int | None = None  # the same with what operators take beyond their results
    live: int | None = None  # live bytes of the real step at its peak
    allocated: int | None = None  # the allocator's peak in the real step
    is_equal: str = ""  # whether loss, gradients and buffers are those of the network to the bit
    flops: float = 1.0  # operations by those of the plain step
    seconds: float = 0.0  # time of planning
    seed: int = SEED  # of the weights


def real(title: str, make: Callable[[], Any], about: dict[str, Any], out: Path) -> Iterator[Planned]:
    model, batch = make()
    beyond = workspace(model, batch)
    expected, live, allocated = _step(model, None, batch)
    plain, most = simulate(model, batch).bytes, simulate(model, batch, beyond).bytes
    measured = {"predicted": plain, "with_workspace": most, "live": live, "allocated": allocated}
    yield Planned(part="real", network=title, method="plain", **measured, **about)
    for method in METHODS:
        plan, seconds = _plan(model, batch, method, beyond)
        other = copy.deepcopy(model)
        found, live, allocated = _step(other, plan, batch)
        is_equal = all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        measured = {"live": live, "allocated": allocated, "is_equal": "equal" if is_equal else "differ"}
        alone = replace(plan, predicted=simulate(plan, batch).bytes)  # of results, as the other rows are
        measured |= {"seconds": seconds, "with_workspace": plan.predicted}
        yield _row("real", title, method, alone, about, **measured)
        if title.startswith(_PICTURED) and method == "cuts":
            peaks = {"plain": simulate(model, batch), "planned": simulate(plan, batch)}
            figure, (ax,) = figure_of(1, 1, width=6.4)
            plot_memory(peaks, ax)
            figure.savefig(out / "graphs-memory.png", dpi=150)
        torch._dynamo.reset()


def paper(title: str, make: Callable[[], Any], about: dict[str, Any], out: Path) -> Iterator[Planned]:
    model, batch = make()
    for method in METHODS:
        plan, seconds = _plan(model, batch, method)
        if method == METHODS[0]:
            yield Planned(part="paper", network=title, method="plain", predicted=plan.plain, **about)
        yield _row("paper", title, method, plan, about, seconds=seconds)


def reorder(title: str, make: Callable[[], Any], about: dict[str, Any], out: Path) -> Iterator[Planned]:
    """Reorder the nodes of a network, plain and with the least plan."""
    model, batch = make()
    alone, seconds = _timed(order, model, batch)
    yield Planned(part="order", network=title, method="plain", predicted=alone.plain, **about)
    yield _row("order", title, "order", alone, about, seconds=seconds)
    plan, seconds = _plan(model, batch, "cuts")
    yield _row("order", title, "cuts", plan, about, seconds=seconds)
    both, seconds = _timed(order, model, batch, plan)
    yield _row("order", title, "cuts and order", both, about, seconds=seconds)


def budgets(title: str, make: Callable[[], Any], about: dict[str, Any], out: Path) -> Iterator[Compiled]:
    yield from compiled(title, make, about)


PARTS = {"real": (real, small), "paper": (paper, large), "order": (reorder, small), "compiled": (budgets, decoders)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choices(parser, "--parts", PARTS)
    add_output(parser)


def run(arguments: argparse.Namespace) -> Iterator[str]:
    about = origin("cpu", arguments.commit)
    for part in arguments.parts:
        rows: list[Any] = []
        measured, networks = PARTS[part]
        for title, make in networks(arguments.tiny).items():
            found = [*measured(title, make, about, arguments.out)]
            rows += found
            write_rows(arguments.out / f"graphs-{part}.csv", rows)
            yield show(found) + "\n"


def _plan(model: nn.Module, batch: Any, method: str, workspace: Workspace | None = None) -> tuple[GraphPlan, float]:
    return _timed(plan_graph, model, batch, memory="least", method=method, workspace=workspace)


def _timed(make: Callable[..., GraphPlan], *arguments: Any, **options: Any) -> tuple[GraphPlan, float]:
    begin = time.perf_counter()
    plan = make(*arguments, **options)
    return plan, time.perf_counter() - begin


def _row(part: str, title: str, method: str, plan: GraphPlan, about: dict[str, Any], **more: Any) -> Planned:
    found = {"found": plan.method, "nodes": len(plan.part), "recomputed": len(plan.recomputed), "flops": plan.flops}
    return Planned(part=part, network=title, method=method, predicted=plan.predicted, **found, **more, **about)


def _step(model: nn.Module, plan: GraphPlan | None, batch: Any) -> tuple[list[Tensor], int, int]:
    """Gradients and buffers after one step from the same state, and the peaks of others, live and allocated."""
    trained = model if plan is None else plan.apply(model)

    def step() -> None:
        torch.manual_seed(SEED)
        run_step(trained, batch)

    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    step()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    found += [buffer.detach().clone() for buffer in model.buffers()]
    model.zero_grad(set_to_none=True)
    allocated = allocator_peak(step)
    model.zero_grad(set_to_none=True)
    graph, inputs = capture(model, batch)
    run = graph if plan is None else plan.run(graph, inputs)
    with peak("cpu") as measured:  # not around a compiled call, which then does not run
        graph_step(run, inputs)
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    return found, measured.bytes, allocated
