"""Plot the actions of a plan of backpropagation through time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rmm_linear._support.installing import INSTALL_EXTRA

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RECORDED = "#0072b2"


def plot_plan(actions: Iterable[Any], steps: int, title: str, ax: Axes | None = None) -> Axes:
    """Plot actions of ``BPTTPlan.actions()`` over so many steps; raises ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"Pictures need matplotlib. Run {INSTALL_EXTRA}.") from error
    ax = ax or Figure(figsize=(7, 4.5), layout="constrained").subplots()
    runs: list[tuple[float, float]] = []
    stored: list[tuple[float, float]] = []
    kept: list[tuple[float, float]] = []
    recorded: list[tuple[float, float]] = []
    clock = 0
    for action in actions:
        if action.kind == "advance":
            runs += [(action.step, clock), (action.end, clock + action.end - action.step), (float("nan"), float("nan"))]
            clock += action.end - action.step
        elif action.kind == "record":
            clock += 1
            (kept if action.is_kept else recorded).append((action.step + 0.5, clock - 0.5))
        elif action.kind == "store":
            stored.append((action.step, clock))
    size = max(1.0, min(5.0, 250 / steps))
    marks = {"linestyle": "", "markersize": size, "color": _RECORDED}
    for points, label, style in (
        (runs, "steps that run", {"color": "0.45", "linewidth": 0.8}),
        (stored, "state stored", {"linestyle": "", "marker": "o", "markersize": size, "color": "black"}),
        (kept, "step recorded, its graph kept", {**marks, "marker": "s"}),
        (recorded, "step recorded, its backward pass next", {**marks, "marker": "s", "markerfacecolor": "none"}),
    ):
        if points:
            ax.plot(*zip(*points, strict=True), label=label, **style)
    ax.set_xlabel("step")
    ax.set_ylabel("forward steps so far")
    ax.set_xlim(-0.5, steps + 0.5)
    ax.invert_yaxis()
    ax.legend(loc="upper right", fontsize=8)
    ax.set_title(title, fontsize=10)
    return ax
