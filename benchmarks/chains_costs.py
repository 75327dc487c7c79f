"""What backpropagation through time costs in how much memory, for three policies, Chen's and Revolve's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import Origin, write_rows
from rmm_linear._support.installing import INSTALL_EXTRA
from rmm_linear._support.tables import table
from rmm_linear.planning import plan_bptt

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
    """One policy in one amount of memory.

    Attributes:
        policy: "states" (hidden states), "graphs" (internal states), "both" (mixed), "Revolve" or "Chen √T".
        steps: T.
        share: Memory by that of T graphs.
        slots: States that are stored at once; of "graphs", graphs.
        forward_steps: Steps that run.
        least: Forward steps that no plan of the policy has fewer of.
        time_ratio: (forward_steps / T + 2) / 3.
        internal_cost: Size of a graph by that of a state.
    """

    policy: str
    steps: int
    share: float
    slots: int
    forward_steps: int
    least: int
    time_ratio: float
    internal_cost: int = INTERNAL_COST


def run(out: Path, about: dict[str, Any], tiny: bool) -> str:
    """Write chains-costs.csv and its picture, and return the table at some amounts of memory.

    Args:
        out: Folder of the files.
        about: Where the rows come from.
        tiny: Whether sizes are small.

    Returns:
        The table.
    """
    counts = (30, 100) if tiny else (100, 1000, 10_000)
    rows = [row for steps in counts for row in costs(steps, about)]
    write_rows(out / "chains-costs.csv", rows)
    figure = plot(rows)
    figure.savefig(out / "chains-costs.png", dpi=150)
    shown = [share for share in (0.01, 0.02, 0.05, 0.1, 0.3) if share in SHARES]
    lines = []
    for steps in counts:
        for policy in ("states", "graphs", "both"):
            found = {row.share: row for row in rows if (row.steps, row.policy) == (steps, policy)}
            cells = ("" if share not in found else f"{found[share].time_ratio:.3f}" for share in shown)
            lines.append((f"{steps:,}", policy, *cells))
    return table(("steps", "policy", *(f"{100 * share:g} %" for share in shown)), lines)


def costs(steps: int, about: dict[str, Any]) -> list[Cost]:
    """Return the costs of all policies for T steps."""
    rows = []
    for share in SHARES:
        states, graphs = int(share * INTERNAL_COST * steps + 1e-9), int(share * steps + 1e-9)
        for policy, slots, cost in (("states", states, None), ("graphs", graphs, 1), ("both", states, INTERNAL_COST)):
            if slots:
                plan = plan_bptt(steps, slots=slots, internal_cost=cost)
                counted = (plan.forward_steps, plan.least_forward_steps, plan.time_ratio)
                rows.append(Cost(policy, steps, share, slots, *counted, **about))
        if states:
            rows.append(_row("Revolve", steps, share, states, revolve(steps, states), about))
    root = math.isqrt(steps)
    # Every √T-th state, and the graphs of one segment; all segments but the last run twice.
    share = (root + INTERNAL_COST * root) / (INTERNAL_COST * steps)
    rows.append(_row("Chen √T", steps, share, root, 2 * steps - root, about))
    return rows


def revolve(steps: int, slots: int) -> int:
    """Forward steps of Revolve in closed form: rt - C(s+r, s+1) advances, s = slots + 1, and t recorded steps."""
    s = slots + 1
    r = next(r for r in range(steps + 1) if math.comb(s + r, s) >= steps)
    return steps + r * steps - math.comb(s + r, s + 1)


def _row(policy: str, steps: int, share: float, slots: int, forward: int, about: dict[str, Any]) -> Cost:
    return Cost(policy, steps, share, slots, forward, forward, (forward / steps + 2) / 3, **about)


def plot(rows: Sequence[Cost]) -> Any:
    """Plot the time against the memory, a panel for each T, as a figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"Pictures need matplotlib. Run {INSTALL_EXTRA}.") from error
    counts = list(dict.fromkeys(row.steps for row in rows))
    figure = Figure(figsize=(3.6 * len(counts) + 0.6, 4.2), layout="constrained")
    panels = figure.subplots(1, len(counts), squeeze=False, sharey=True)[0]
    for steps, axis in zip(counts, panels, strict=True):
        for policy, (marker, line, color) in _STYLES.items():
            points = [(100 * row.share, row.time_ratio) for row in rows if (row.steps, row.policy) == (steps, policy)]
            size = {"Chen √T": 13, "Revolve": 9}.get(policy, 4)
            style = {"marker": marker, "linestyle": line, "color": color, "markersize": size}
            axis.plot(*zip(*sorted(points), strict=True), label=policy, **style)
        axis.set_xscale("log")
        axis.set_xticks([0.5, 1, 2, 5, 10, 20, 50, 100], ["0.5", "1", "2", "5", "10", "20", "50", "100"])
        axis.set_xticks([], minor=True)
        axis.axhline(1, color="black", linewidth=1)
        axis.set_ylim(0.95, 3)
        axis.set_title(f"{steps:,} steps", fontsize=10)
        axis.set_xlabel("memory, % of all graphs")
        axis.grid(color="0.9", linewidth=0.6)
    panels[0].set_ylabel("time by that of a plain run")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=5, fontsize=9)
    return figure
