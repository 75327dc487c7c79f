"""Plot memory over one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rmm_linear._support.installing import INSTALL_EXTRA
from rmm_linear.memory.peak import Peak
from rmm_linear.planning.step.follow import FORWARD

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7")
_STYLES = ("-", "--", "-.", ":")


def plot_memory(peaks: Mapping[str, Peak], ax: Axes | None = None) -> Axes:
    """Plot the live bytes over one step, plain and planned.

    Args:
        peaks: Label to what :func:`rmm_linear.planning.simulate` returned.
        ax: Axes to plot on; None makes new ones.

    Returns:
        The Axes. To the right go allocations and releases, the forward pass and the rest of each step in one half, so
        that the steps can be compared; upwards goes memory in MiB. A circle is a peak.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there is nothing to plot.

    Example:
        >>> import torch
        >>> from rmm_linear.planning import plan_blocks, simulate
        >>> model, x = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))), torch.ones(1000, 64)
        >>> plan = plan_blocks(model, x, memory=1.0)
        >>> axes = plot_memory({"plain": simulate(model, x), "planned": simulate(plan, x)})
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"Pictures need matplotlib. Run {INSTALL_EXTRA}.") from error
    if not peaks or any(not peak.timeline for peak in peaks.values()):
        raise ValueError("peaks must have memory over time, got none. Pass what planning.simulate() returned.")
    ax = ax or Figure(figsize=(7, 4), layout="constrained").subplots()
    for number, (label, peak) in enumerate(peaks.items()):
        x, y = _positions(peak), [size / 2**20 for size, _ in peak.timeline]
        color, style = _COLORS[number % len(_COLORS)], _STYLES[number % len(_STYLES)]
        ax.step(x, y, where="post", color=color, linestyle=style, linewidth=1, label=f"{label}, {max(y):,.1f} MiB")
        highest = max(range(len(y)), key=y.__getitem__)
        ax.plot([x[highest]], [y[highest]], marker="o", color=color, markerfacecolor="none", linestyle="")
    ax.axvline(1, color="0.7", linewidth=0.8)
    ax.set_xlim(0, 2)
    ax.set_xticks([0.5, 1.5], ["forward pass", "backward pass"])
    ax.tick_params(axis="x", length=0)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("live, MiB")
    ax.legend(loc="upper right", fontsize=8)
    return ax


def _positions(peak: Peak) -> list[float]:
    """Return the places of the events: the forward pass from 0 to 1, the rest from 1 to 2."""
    forward = sum(moment.startswith(f"{FORWARD} of") for _, moment in peak.timeline)
    rest = len(peak.timeline) - forward
    return [*((i + 1) / max(forward, 1) for i in range(forward)), *(1 + (i + 1) / max(rest, 1) for i in range(rest))]
