"""The picture of the benchmark of fit: time against memory, one panel per model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.fit_rows import CHEN, EXACT, FIT, Fitted
from benchmarks.plots import figure_of

_STYLES = {
    "recompute": ("s", "#0072b2"),
    "selective": ("D", "#56b4e9"),
    "sketch": ("^", "#d55e00"),
    "pack": ("v", "#e69f00"),
    "convert tenth": ("P", "#cc79a7"),
    "convert narrow": ("X", "#cc79a7"),
    "offload": ("<", "#555555"),
    CHEN: ("*", "#009e73"),
}
_ACROSS = 3


def plot_frontier(rows: Sequence[Fitted]) -> Any:
    """Plot the time of a step against the peak above the floor.

    Args:
        rows: Of one model or more.

    Returns:
        The figure.
    """
    models = list(dict.fromkeys(row.model for row in rows))
    across = min(_ACROSS, len(models))
    figure, axes = figure_of(-(-len(models) // across), across)
    for model, axis in zip(models, axes, strict=False):
        _panel(axis, [row for row in rows if row.model == model and row.measured is not None])
        axis.set(title=model, xlabel="peak above the floor, MB", ylabel="time by the exact step's")
    for axis in axes[len(models) :]:
        axis.set_axis_off()
    about = rows[0]
    threads = f"{about.threads} thread{'s' if about.threads != 1 else ''}"
    figure.suptitle(f"Time and memory of plans\n{about.machine}, {threads}, PyTorch {about.torch}", fontsize=11)
    labels = {name: handle for axis in axes for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=5, fontsize=9)
    return figure


def _panel(axis: Any, rows: Sequence[Fitted]) -> None:
    def points(chosen: Sequence[Fitted]) -> tuple[list[float], list[float]]:
        ordered = sorted(chosen, key=lambda row: row.measured or 0)
        return [((row.measured or 0) - row.floor) / 1e6 for row in ordered], [row.time or 0.0 for row in ordered]

    ours = [row for row in rows if row.method in (EXACT, FIT)]
    axis.plot(*points(ours), color="black", marker="o", markersize=5, label="fit")
    exact = [row for row in rows if row.method == EXACT]
    for method, (marker, color) in _STYLES.items():
        here = [row for row in rows if row.method in (method, f"{method} half", f"{method} all")]
        if here:
            axis.plot(*points([*exact, *here]), color=color, linewidth=0.8, alpha=0.6)
        for row in here:
            filled = {"markerfacecolor": color if row.within == "yes" else "none"}
            axis.plot(*points([row]), linestyle="", marker=marker, color=color, markersize=7, label=method, **filled)
    axis.set_xlim(left=0)
    axis.grid(color="0.9", linewidth=0.6)
