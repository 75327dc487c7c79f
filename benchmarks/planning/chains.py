"""Chains of steps in little memory: optimal subsets, what backpropagation through time costs, runs of it, and sweeps.

Each part measures, writes a csv file and pictures into a folder, and returns what is printed. Steps and bytes are
counted, so that the machine does not matter; how long sweeps wait for their store is timed.
"""

from __future__ import annotations

import argparse
import math
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.figures import figure_of, legend_of, x_ticks
from benchmarks.library import adapted
from benchmarks.planning import sweep
from benchmarks.records import Origin, add_choices, add_output, origin, show, write_rows
from rmm_linear.memory import peak
from rmm_linear.planning import ChainPlan, bptt, chain_sizes, checkpoint_chain, minimum_peak, plan_bptt, step_bytes

SEED = 0


@dataclass(frozen=True)
class Run(Origin):
    """One run forward and backward."""

    cell: str  # which cell
    steps: int  # T
    batch: int  # sequences
    hidden: int  # width of the state, and of the inputs
    policy: str  # "plain", "states", "graphs" or "both"
    budget: str  # what was asked for
    slots: int  # slots of the plan
    planned_steps: int  # forward steps of the plan
    counted_steps: int  # steps that ran, without two trial steps
    time_ratio: float  # (planned_steps / T + 2) / 3
    planned_bytes: int | None  # what the plan says is kept
    # peak of tensors made in the run, outputs and the gradient of the inputs among them, and the random generators'
    # states
    peak_bytes: int
    # the same where there are neither: the loss takes the last state alone, inputs need no gradient
    recurrent_bytes: int
    share: float  # recurrent_bytes by those of the plain loop
    gradients: str  # "equal" to the plain loop's to the bit, or the largest difference by the largest gradient
    internal_cost: int | None = None  # slots of a graph; None where graphs are not kept
    seed: int = SEED  # of everything


class Dropping(nn.Module):
    """An LSTM cell with dropout on its inputs."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(hidden, hidden)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = self.cell(nn.functional.dropout(x, 0.1), state)
        return h, (h, c)


class Quiet(nn.Module):
    """A cell that puts out nothing but its last state."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, state: Any) -> tuple[None, Any]:
        step, state = adapted(self.cell, state, x)
        return None, step(x, state)[1]


CELLS: dict[str, Callable[[int], nn.Module]] = {
    "LSTM": lambda hidden: nn.LSTMCell(hidden, hidden),
    "LSTM, dropout": Dropping,
    "GRU": lambda hidden: nn.GRUCell(hidden, hidden),
}


def all_runs(about: dict[str, Any], tiny: bool) -> Iterator[Run]:
    for name in CELLS:
        yield from runs(name, (20, 2, 8) if tiny else (1000, 16, 64), about)


def runs(name: str, shape: tuple[int, int, int], about: dict[str, Any]) -> list[Run]:
    """Run a cell as a plain loop and by the three policies."""
    steps, batch, hidden = shape
    torch.manual_seed(SEED)
    cell, x = CELLS[name](hidden), torch.randn(steps, batch, hidden, requires_grad=True)
    state = tuple(torch.zeros(2, batch, hidden)) if "LSTM" in name else torch.zeros(batch, hidden)
    calls: list[int] = []
    cell.register_forward_pre_hook(lambda *_: calls.append(1))
    measured = step_bytes(cell, x, state)
    tenth, graphs = steps // 20, measured.graph * steps
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("plain", "", {}),
        ("states", f"{tenth} states", {"slots": tenth, "internal": False}),
        ("graphs", f"{tenth} graphs, 5 %", {"slots": tenth, "internal": "only"}),
        ("both", "5 % of all graphs", {"memory": graphs // 20 + measured.graph}),
        ("both", "5 % of plain", {"memory": measured.plain * steps // 20 + measured.graph}),
    ]
    found: list[Run] = []
    expected: list[Tensor] = []
    for policy, budget, options in asked:
        plan = measured.plan(steps, **({"slots": steps, "internal": "only"} if policy == "plain" else options))
        forward, kept = plan.forward_steps, plan.bytes  # makes the table of splits, which is none of a run's tensors
        for leaf in (x, *cell.parameters()):
            leaf.grad = None
        calls.clear()
        torch.manual_seed(SEED)
        with peak("cpu") as made, generator_bytes() as drawn:
            outputs = _loop(cell, x, state) if policy == "plain" else bptt(cell, x, state, **options)[0]
            outputs.sum().backward()
        count = len(calls)
        grads = [leaf.grad for leaf in (x, *cell.parameters()) if leaf.grad is not None]
        expected = expected or grads
        trials = 2 if policy == "both" else 0
        del outputs
        recurrent = _recurrent(cell, x.detach(), state, options)
        share = recurrent / (found[0].recurrent_bytes if found else recurrent)
        numbers = (forward, count - trials, plan.time_ratio, kept, made.bytes + drawn.most, recurrent, share)
        fixed = (name, *shape, policy, budget, plan.slots)
        found.append(Run(*fixed, *numbers, _difference(expected, grads), plan.internal_cost, **about))
    return found


def _recurrent(cell: nn.Module, x: Tensor, state: Any, options: dict[str, Any]) -> int:
    """Peak of a run without outputs and without a gradient of the inputs."""
    quiet = Quiet(cell)
    quiet.zero_grad()
    with peak("cpu") as made, generator_bytes() as drawn:
        if options:
            last = bptt(quiet, x, state, **options)[1]
        else:
            last = state
            for x_t in x.unbind(0):
                last = quiet(x_t, last)[1]
        (last if isinstance(last, Tensor) else last[0]).sum().backward()
    return made.bytes + drawn.most


@contextmanager
def generator_bytes() -> Iterator[SimpleNamespace]:
    """Follow the bytes of the random generators' states that are alive, and the most there were."""
    found, read = SimpleNamespace(now=0, most=0), torch.get_rng_state

    def add(count: int) -> None:
        found.now += count
        found.most = max(found.most, found.now)

    def seen() -> Tensor:
        state = read()
        add(state.nbytes)
        weakref.finalize(state, add, -state.nbytes)
        return state

    with mock.patch.object(torch, "get_rng_state", seen):
        yield found


def _loop(cell: nn.Module, x: Tensor, state: Any) -> Tensor:
    step, state = adapted(cell, state, x[0])
    outputs = []
    for x_t in x.unbind(0):
        output, state = step(x_t, state)
        outputs.append(output)
    return torch.stack(outputs)


def _difference(expected: list[Tensor], found: list[Tensor]) -> str:
    if all(torch.equal(old, new) for old, new in zip(expected, found, strict=True)):
        return "equal"
    largest = max(float((old - new).abs().max() / old.abs().max()) for old, new in zip(expected, found, strict=True))
    return f"{largest:.1e}"


@dataclass(frozen=True)
class Subset(Origin):
    """The best subset of one chain."""

    chain: str  # which chain
    outputs: int  # its outputs, n
    kept: int  # outputs that are kept
    peak: int  # peak that is predicted, in bytes, or in outputs where they are of one size
    everything: int  # peak if all outputs are kept, predicted
    measured: int | None = None  # peak of a run, with the chain's input; None if it was not run
    measured_everything: int | None = None  # the same if all outputs are kept
    is_equal: str = ""  # whether the gradients are those of the plain run to the bit
    seed: int = SEED  # of the sizes and weights


def subsets(about: dict[str, Any], tiny: bool) -> Iterator[Subset]:
    """Find the best subsets of chains of many sizes, and run two of them."""
    draw = random.Random(SEED)
    for count in (10**2, 10**3) if tiny else (10**2, 10**3, 10**4, 10**5, 10**6):
        for name, sizes in (("equal", [1] * count), ("uniform", [draw.randint(1, 10**6) for _ in range(count)])):
            plan = minimum_peak(sizes)
            yield Subset(name, count, len(plan.kept), plan.peak, _everything(sizes), **about)
    yield from (_measured(count, about) for count in ((6, 12) if tiny else (50, 200)))


def _everything(sizes: list[int]) -> int:
    """Peak with all outputs kept: all of them, and two gradients."""
    return max(total + size + after for total, (size, after) in zip(accumulate(sizes), pairwise(sizes), strict=False))


def _measured(count: int, about: dict[str, Any]) -> Subset:
    """A network of several widths, run by its plan and with everything kept; each module saves its input and output."""
    torch.manual_seed(SEED)
    draw = random.Random(SEED)
    widths = [64 * draw.randint(1, 16) for _ in range(count + 1)]
    layers = (nn.Sequential(nn.Linear(i, o), nn.Tanh()) for i, o in pairwise(widths))
    modules = nn.Sequential(*layers)
    modules.requires_grad_(False)  # their gradients are no part of the chain
    x = torch.randn(256, widths[0], requires_grad=True)
    plan = minimum_peak(chain_sizes(modules, x))
    found = []
    for chosen in (plan, ChainPlan(0, tuple(range(len(modules) + 1)))):
        x.grad = None
        with peak("cpu") as measured:
            checkpoint_chain(modules, x, chosen).sum().backward()
        # The input was there before, and is a part of the prediction.
        found.append((measured.bytes + x.nbytes, x.grad))
    (ours, grad), (plain, expected) = found
    is_equal = "equal" if grad is not None and expected is not None and torch.equal(grad, expected) else "differ"
    shape = (len(modules) + 1, len(plan.kept), plan.peak, _everything(chain_sizes(modules, x)))
    return Subset("linear and tanh", *shape, ours, plain, is_equal, **about)


INTERNAL_COST = 4  # of an LSTM: a step keeps 7 of its units in a plain loop, and a state has 2
SHARES = (0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
_STYLES = {
    "states": ("o", "--", "#d55e00"),
    "graphs": ("s", "-.", "#0072b2"),
    "both": ("D", "-", "#000000"),
    "Revolve": ("+", "", "#009e73"),
    "Chen √T": ("*", "", "#cc79a7"),
}


@dataclass(frozen=True)
class Cost(Origin):
    """One policy in one amount of memory."""

    policy: str  # "states" (hidden states), "graphs" (internal states), "both" (mixed), "Revolve" or "Chen √T"
    steps: int  # T
    share: float  # memory by that of T graphs
    slots: int  # states that are stored at once; of "graphs", graphs
    forward_steps: int  # steps that run
    least: int  # forward steps that no plan of the policy has fewer of
    time_ratio: float  # (forward_steps / T + 2) / 3
    internal_cost: int = INTERNAL_COST  # size of a graph by that of a state


def costs(steps: int, about: dict[str, Any]) -> list[Cost]:
    def row(policy: str, share: float, slots: int, forward: int) -> Cost:
        return Cost(policy, steps, share, slots, forward, forward, (forward / steps + 2) / 3, **about)

    rows = []
    for share in SHARES:
        states, graphs = int(share * INTERNAL_COST * steps + 1e-9), int(share * steps + 1e-9)
        for policy, slots, cost in (("states", states, None), ("graphs", graphs, 1), ("both", states, INTERNAL_COST)):
            if slots:
                plan = plan_bptt(steps, slots=slots, internal_cost=cost)
                counted = (plan.forward_steps, plan.least_forward_steps, plan.time_ratio)
                rows.append(Cost(policy, steps, share, slots, *counted, **about))
        if states:
            rows.append(row("Revolve", share, states, revolve(steps, states)))
    root = math.isqrt(steps)
    # Every √T-th state, and the graphs of one segment; all segments but the last run twice.
    share = (root + INTERNAL_COST * root) / (INTERNAL_COST * steps)
    rows.append(row("Chen √T", share, root, 2 * steps - root))
    return rows


def revolve(steps: int, slots: int) -> int:
    """Forward steps of Revolve in closed form: rt - C(s+r, s+1) advances, s = slots + 1, and t recorded steps."""
    s = slots + 1
    r = next(r for r in range(steps + 1) if math.comb(s + r, s) >= steps)
    return steps + r * steps - math.comb(s + r, s + 1)


def plot(rows: Sequence[Cost]) -> Any:
    counts = list(dict.fromkeys(row.steps for row in rows))
    figure, panels = figure_of(1, len(counts), width=3.6, height=3.0)
    for steps, axis in zip(counts, panels, strict=True):
        for policy, (marker, line, color) in _STYLES.items():
            points = [(100 * row.share, row.time_ratio) for row in rows if (row.steps, row.policy) == (steps, policy)]
            size = {"Chen √T": 13, "Revolve": 9}.get(policy, 4)
            style = {"marker": marker, "linestyle": line, "color": color, "markersize": size}
            axis.plot(*zip(*sorted(points), strict=True), label=policy, **style)
        x_ticks(axis, [0.5, 1, 2, 5, 10, 20, 50, 100], ["0.5", "1", "2", "5", "10", "20", "50", "100"])
        axis.axhline(1, color="black", linewidth=1)
        axis.set(ylim=(0.95, 3), title=f"{steps:,} steps", xlabel="memory, % of all graphs")
        axis.grid(color="0.9", linewidth=0.6)
    panels[0].set_ylabel("time relative to a plain run")
    legend_of(figure, panels[:1], ncols=5)
    return figure


# Title to the csv files, each with a function of where rows come from and whether sizes are small.
PARTS: dict[str, dict[str, Callable[[dict[str, Any], bool], Iterable[Any]]]] = {
    "subsets": {"chains-subsets": subsets},
    "costs": {
        "chains-costs": lambda about, tiny: [
            row for steps in ((30, 100) if tiny else (100, 1000, 10_000)) for row in costs(steps, about)
        ]
    },
    "bptt": {"chains-bptt": all_runs},
    "sweep": {"chains-sweep-steps": sweep.counts, "chains-sweep-waits": sweep.waits},
}
_PLOTS: dict[str, Callable[[Sequence[Any]], Any]] = {"chains-costs": plot, "chains-sweep-waits": sweep.plot}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choices(parser, "--parts", PARTS)
    add_output(parser)


def run(arguments: argparse.Namespace) -> Iterator[str]:
    about = origin("cpu", arguments.commit)
    for stem, make in (each for part in arguments.parts for each in PARTS[part].items()):
        rows = list(make(about, arguments.tiny))
        write_rows(arguments.out / f"{stem}.csv", rows)
        if stem in _PLOTS:
            _PLOTS[stem](rows).savefig(arguments.out / f"{stem}.png", dpi=150)
        yield f"{stem}\n{show(rows)}\n"
