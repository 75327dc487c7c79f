"""Axes, scales, colours and captions that the plots of the noise share. matplotlib is imported on the first plot."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rmm_linear._support.installing import INSTALL_EXTRA
from rmm_linear.sketches import KINDS
from rmm_linear.variance.survey.survey import PAPER

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

NOISE = "sketch noise / minibatch noise"
FLOOR = 1e-3  # 0 cannot be shown on a logarithmic axis
_MARKERS = dict(zip(KINDS, "osv^D<>P*", strict=True))
# Nine hues that stay apart with any of the three colour blindnesses (Tol, "muted"); lightness differs too.
COLOURS = dict(
    zip(
        KINDS,
        ("#332288", "#cc6677", "#88ccee", "#117733", "#ddcc77", "#44aa99", "#882255", "#999933", "#aa4499"),
        strict=True,
    )
)


def axes(ax: Axes | None, table: pandas.DataFrame, *columns: str) -> Axes:
    """Return the given Axes or new ones, for a table with these columns."""
    check(table, *columns)
    return ax or new_axes()


def check(table: pandas.DataFrame, *columns: str) -> None:
    """Raise a ValueError if a table is empty or lacks a column."""
    missing = [name for name in columns if name not in table.columns]
    if missing or not len(table):
        raise ValueError(
            f"The table must have the columns {', '.join(columns)} and at least one row, got {len(table)} rows of "
            f"{', '.join(map(str, table.columns)) or 'nothing'}."
        )


def new_axes(width: float = 7.0, height: float = 4.2) -> Axes:
    """Return the Axes of a new figure; inches."""
    return _pyplot().subplots(figsize=(width, height), layout="constrained")[1]


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(f"Plots need matplotlib. Run {INSTALL_EXTRA}.") from error
    return plt


def style(setting: str) -> dict[str, Any]:
    """Return the colour, line and marker of a kind, or of the published method."""
    if setting == PAPER:
        return {"color": "black", "linestyle": ":", "marker": "x"}
    return {"color": COLOURS[setting], "linestyle": "-", "marker": _MARKERS[setting], "markerfacecolor": "none"}


def greys() -> Any:
    """Return greys from light to dark; white is left to cells without a value."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("greys", ["0.93", "0.05"])


def step_axis(ax: Axes) -> None:
    """Make the x axis one of training steps."""
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel("training step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def noise_axis(ax: Axes) -> Axes:
    """Make the y axis one of noise, logarithmic, with a line at 1; call it when everything is plotted."""
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.tick_params(axis="y", which="minor", left=False)
    ax.axhline(1, color="black", linewidth=1, linestyle="--", label="the minibatch's own")
    low, high = ax.get_ylim()
    if high < 10 * low:  # at least a decade, for enough ticks and so that small differences look small
        middle = math.sqrt(low * high)
        ax.set_ylim(middle / math.sqrt(10), middle * math.sqrt(10))
    ax.set_ylabel(NOISE)
    ax.grid(axis="y", color="0.9")
    ax.set_axisbelow(True)
    return ax


def caption(ax: Axes, text: str) -> None:
    """Write a sentence below the x axis."""
    below: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "top"}
    ax.annotate(text, (0, 0), (0, -50), fontsize=8, color="0.3", **below)
