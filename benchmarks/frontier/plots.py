"""Pictures of the comparison: scores and times against bytes, and curves with bands."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.frontier.means import mean_and_error
from benchmarks.frontier.methods import EXACT, METHODS
from benchmarks.frontier.page import apart_of, scores_of, share_of
from benchmarks.frontier.rows import Cost, Epoch, Point
from benchmarks.plots import figure_of

_TITLES = {"sst2": "SST-2, accuracy", "cola": "CoLA, Matthews", "stsb": "STS-B, Pearson", "rte": "RTE, accuracy"}
_GROUPS = {
    "exact": ("s", "black"),
    "published": ("^", "#d55e00"),
    "fewer parameters": ("D", "#0072b2"),
    "ours": ("o", "#009e73"),
}
_COLORS = ("#000000", "#d55e00", "#e69f00", "#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#555555")


def plot_frontier(epochs: Sequence[Epoch], costs: Sequence[Cost]) -> Any:
    """Plot scores, over all tasks and of every one, and the time of a step, against what lives between the two passes.

    Args:
        epochs: All runs.
        costs: All measurements of steps.

    Returns:
        The figure; None if no task was measured that has a panel.
    """
    tasks = [task for task in _TITLES if any(row.task == task for row in costs)]
    if not tasks:
        return None
    figure, axes = figure_of(-(-(len(tasks) + 2) // 3), 3)
    for method, how in METHODS.items():
        kept, time = (share_of(costs, tasks, method, field) for field in ("kept", "time"))
        apart = mean_and_error([0.0] if how.is_exact else apart_of(epochs, tasks, method))
        if kept is not None and apart is not None:
            _mark(axes[0], method, 100 * kept, 100 * apart[0], 100 * apart[1])
        if kept is not None and time is not None:
            _mark(axes[1], method, 100 * kept, time)
    share = "kept for the backward pass, % of exact"
    axes[0].set(title="score, mean over tasks", xlabel=share, ylabel="by exact's, × 100")
    axes[1].set(title="time of a step, mean over tasks", xlabel=share, ylabel="by exact's")
    for task, axis in zip(tasks, axes[2:], strict=False):
        for row in (row for row in costs if row.task == task and row.kept is not None):
            found = mean_and_error(scores_of(epochs, task, EXACT if METHODS[row.method].is_exact else row.method))
            if found is not None:
                _mark(axis, row.method, (row.kept or 0) / 1e6, 100 * found[0], 100 * found[1])
        axis.set(title=_TITLES[task], xlabel="kept for the backward pass, MB", ylabel="× 100")
    for axis in axes[len(tasks) + 2 :]:
        axis.set_axis_off()
    labels = {name: handle for axis in axes for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=4, fontsize=9)
    return figure


def _mark(axis: Any, method: str, kept: float, value: float, error: float = math.nan) -> None:
    how = METHODS[method]
    marker, color = _GROUPS[how.group]
    bar = None if math.isnan(error) else error
    axis.errorbar(kept, value, yerr=bar, marker=marker, color=color, capsize=2, linestyle="", label=how.group)
    axis.annotate(method, (kept, value), xytext=(4, 3), textcoords="offset points", fontsize=6, color=color)
    axis.grid(color="0.9", linewidth=0.6)


def plot_curves(points: Sequence[Point], batches: dict[str, int]) -> Any:
    """Plot the held-out loss of every study: means over seeds, with bands from the least to the greatest.

    Args:
        points: All evaluations.
        batches: Rows per step of every study; exact runs with others are thinner and dashed, without bands.

    Returns:
        The figure.
    """
    studies = [study for study in batches if any(row.study == study for row in points)]
    figure, axes = figure_of(1, len(studies))
    every = list(dict.fromkeys(row.method for row in points))
    for study, axis in zip(studies, axes, strict=False):
        here = [row for row in points if row.study == study and row.batch == batches[study]]
        for method in dict.fromkeys(row.method for row in here):
            color = _COLORS[every.index(method) % len(_COLORS)]
            by_step: dict[int, list[float]] = {}
            for row in here:
                if row.method == method:
                    by_step.setdefault(row.step, []).append(row.dev_loss)
            steps = sorted(by_step)
            axis.plot(
                steps, [statistics.mean(by_step[step]) for step in steps], color=color, label=METHODS[method].title
            )
            least, most = ([choose(by_step[step]) for step in steps] for choose in (min, max))
            axis.fill_between(steps, least, most, color=color, alpha=0.15, linewidth=0)
        for size in sorted({row.batch for row in points if row.study == study} - {batches[study]}):
            by_step = {}
            for row in (row for row in points if (row.study, row.batch) == (study, size)):
                by_step.setdefault(row.step, []).append(row.dev_loss)
            steps = sorted(by_step)
            means = [statistics.mean(by_step[step]) for step in steps]
            axis.plot(steps, means, color="0.5", linewidth=0.8, linestyle="--")
            axis.annotate(f"exact, batch of {size}", (steps[-1], means[-1]), ha="right", fontsize=6, color="0.4")
        axis.set(title=study, xlabel="step", ylabel="held-out loss", yscale="log")
        axis.grid(color="0.9", linewidth=0.6)
        axis.legend(fontsize=7)
    return figure
