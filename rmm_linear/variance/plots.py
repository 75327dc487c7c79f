"""Plot the variance ratio: over training, by layer, against memory, and with the published bound.

Every function plots on the given Axes, or on new ones, and returns them; nothing is shown or saved, and the title is
the caller's: ``plot_noise_over_training(table).set_title("RoBERTa-base, CoLA, batches of 64")``.
matplotlib is imported on the first plot.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from rmm_linear._support.installing import INSTALL_EXTRA
from rmm_linear.sketches import KINDS
from rmm_linear.variance.probe.results import SEQUENCES
from rmm_linear.variance.published import bound_of
from rmm_linear.variance.survey.survey import AUTO, PAPER, MemoryNoise

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

_BY_TOKENS = ", by tokens"
_BOUND, _FORMULA = "#0072b2", "#d55e00"
_ROUNDING = (
    "Where every token has a row, only rounding is left, and more memory does not lower it: "
    "the floor of 2 bits is some 25 times that of 4."
)


def plot_noise_over_training(table: pandas.DataFrame, ax: Axes | None = None) -> Axes:
    """Plot the median variance ratio over the layers against the training step, with a band between the quartiles.

    Args:
        table: The probe's table, with the columns step and noise, and optionally samples.
        ax: Axes to plot on; None makes new ones.

    Returns:
        The Axes. The ratio is D²_sketch / D²_SGD, on a logarithmic axis. If the table has ratios over sequences, rows
        with ratios over tokens, which cannot be compared with them, are left out.
    """
    ax = axes(ax, table, "step", "noise")
    table, suffix = _comparable(table)
    by_step = table.groupby("step")["noise"]
    # "lower" instead of interpolation: noise can be infinite.
    low, middle, high = (by_step.quantile(part, interpolation="lower").clip(lower=FLOOR) for part in (0.25, 0.5, 0.75))
    ax.fill_between(middle.index, low, high, color="0.8", label="middle half of the layers")
    ax.plot(middle.index, middle, color="black", marker="o", markersize=4, label="median layer")
    step_axis(ax)
    noise_axis(ax).legend()
    ax.set_ylabel(NOISE + suffix)
    return ax


def plot_noise_by_layer(table: pandas.DataFrame, ax: Axes | None = None) -> Axes:
    """Plot a heat map of the variance ratio, layers by modules, each cell the median over the steps.

    The layer is the first number in a module's name: ``encoder.layer.3.output.dense`` is ``output.dense`` of layer 3.
    If several parts of a model have numbered layers, such as an encoder and a decoder, each has its own columns.

    Args:
        table: The probe's table, with the columns module and noise, and optionally samples.
        ax: Axes to plot on; None makes new ones.

    Returns:
        The Axes. The ratio is D²_sketch / D²_SGD, on a logarithmic scale around 1: blue is less noise than the
        minibatch has, red is more. Cells whose ratio is 0, infinite or NaN have a word on grey instead of a colour and
        do not affect the scale. If the table has ratios over sequences, rows with ratios over tokens, which cannot be
        compared with them unless they are 0, are left out.
    """
    check(table, "module", "noise")
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import LogLocator

    table, suffix = _comparable(table, with_exact=True)
    noise = {str(name): float(part["noise"].median()) for name, part in table.groupby("module", sort=False)}
    places = _places(list(noise))
    layers = sorted({layer for layer, _ in places.values()})
    modules = list(dict.fromkeys(module for _, module in places.values()))
    ax = ax or new_axes(max(7.0, 2 + 0.7 * len(modules)), max(4.2, 2 + 0.25 * len(layers)))
    grid = [[math.nan] * len(modules) for _ in layers]
    words: dict[tuple[int, int], str] = {}
    for name, (layer, module) in places.items():
        i, j = layers.index(layer), modules.index(module)
        if math.isfinite(noise[name]) and noise[name] > 0:
            grid[i][j] = max(noise[name], FLOOR)
        else:
            words[i, j] = "exact" if noise[name] == 0 else "no value" if math.isnan(noise[name]) else "infinite"
    values = [value for row in grid for value in row if value > FLOOR]
    farthest = max([2.0, *(max(value, 1 / value) for value in values)])
    scale, colours = LogNorm(1 / farthest, farthest), colormaps["RdBu_r"].with_extremes(bad="0.85")
    image = ax.imshow(grid, norm=scale, cmap=colours, aspect="auto")
    if len(noise) <= 200:
        for i, row in enumerate(grid):
            for j, value in enumerate(row):
                if value == value:
                    words[i, j] = f"{value:.2g}" if value > FLOOR else f"≤ {FLOOR:g}"
    for (i, j), word in words.items():
        shade = "white" if grid[i][j] == grid[i][j] and abs(scale(grid[i][j]) - 0.5) > 0.35 else "black"
        ax.text(j, i, word, ha="center", va="center", color=shade, fontsize=8)
    ax.set_xticks(range(len(modules)), modules, rotation=30, ha="right")
    ax.set_yticks(range(len(layers)), ["none" if layer < 0 else str(layer) for layer in layers])
    ax.set_xlabel("module")
    ax.set_ylabel("layer")
    label = NOISE + suffix
    ax.figure.colorbar(image, ax=ax, label=label, ticks=LogLocator(subs=(1, 2, 5)), format="{x:g}").minorticks_off()
    return ax


def plot_noise_against_memory(noises: Sequence[MemoryNoise], ax: Axes | None = None) -> Axes:
    """Plot the median variance ratio over the layers for every kind and width, side by side at equal memory.

    Args:
        noises: See :func:`rmm_linear.variance.noise_at_memory`.
        ax: Axes to plot on; None makes new ones.

    Returns:
        The Axes. From left to right the saved memory, in per cent of the input's bytes, and at each memory the widths,
        from wide to narrow; a line for each kind. The published method, which has one width, is repeated at every
        width. The ratio is D²_sketch / D²_SGD, on a logarithmic axis; a line at 1 is as much as the minibatch. Ratios
        below 0.001, 0 included, are shown at 0.001. If 2 bits are among the widths, a caption explains why their
        ratio stops falling.

    Raises:
        ValueError: If ``noises`` is empty.
    """
    if not noises:
        raise ValueError("The plot needs the variance ratio of at least one layer, got none. See noise_at_memory.")
    found: dict[str, dict[tuple[float, float], list[float]]] = {}
    for entry in noises:
        if entry.setting != AUTO:  # it equals one of the other points at each memory
            found.setdefault(entry.setting, {}).setdefault((entry.memory, entry.bits), []).append(entry.noise)
    memories = sorted({entry.memory for entry in noises})
    widths = sorted({entry.bits for entry in noises}, reverse=True)
    groups = [[place * (len(widths) + 1) + i for i in range(len(widths))] for place in range(len(memories))]
    ax = ax or new_axes(max(7.0, 4.5 + 0.3 * len(groups) * (len(widths) + 1)))
    for setting, values in found.items():
        points: list[tuple[float, float]] = []
        for memory, places in zip(memories, groups, strict=True):
            for place, bits in zip(places, widths, strict=True):
                # The published method has one width; it is repeated at every width.
                cell = values.get((memory, max(b for _, b in values) if setting == PAPER else bits), [math.nan])
                points.append((place, max(median(cell), FLOOR)))
            points.append((math.nan, math.nan))  # no line from one memory to the next
        ax.plot(*zip(*points, strict=True), label=setting, **style(setting))
    noise_axis(ax)
    ax.set_xticks(
        [place for places in groups for place in places], [str(bits) for bits in widths] * len(groups), minor=True
    )
    ax.set_xticks([sum(places) / len(places) for places in groups], [f"\n{100 * memory:g} %" for memory in memories])
    ax.tick_params(axis="x", which="major", length=0)
    ax.set_xlabel("bits per element, and saved memory (% of the input's bytes)")
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    if min(widths) == 2:
        caption(ax, _ROUNDING)
    return ax


def plot_bound(table: pandas.DataFrame, ax: Axes | None = None) -> Axes:
    """Plot the paper's variance study: the exact ratio of the variances, the published formula and the published bound.

    Samples are tokens here, as in the paper. The bound on D²_sketch/D²_SGD is (N−1)/K · (α+1)/α; it does not hold in
    general, see :func:`rmm_linear.variance.paper_bound`.

    Args:
        table: Columns step, rows (K), tokens (N), alpha, sgd_variance (over tokens), sketch_variance (exact) and
            paper_variance, see :func:`rmm_linear.variance.paper_sketch_variance`.
        ax: Axes to plot on; None makes new ones.

    Returns:
        The Axes. Ratios without unit, on a logarithmic axis.
    """
    columns = ("step", "rows", "tokens", "alpha", "sgd_variance", "sketch_variance", "paper_variance")
    ax = axes(ax, table, *columns)
    table = table.sort_values("step")
    scale, step = (table["tokens"] - 1) / table["rows"], table["step"]
    exact, paper = (table[name] / table["sgd_variance"] for name in ("sketch_variance", "paper_variance"))
    ax.plot(step, scale * bound_of(table["alpha"]), color=_BOUND, linestyle="-.", marker="s", label="the paper's bound")
    # A thin line on a thick one: where the two agree, both are seen.
    ax.plot(step, exact, color="0.75", linewidth=6, marker="o", markersize=10, label="exact")
    ax.plot(step, paper, color=_FORMULA, linestyle="--", marker="^", label="the paper's formula, (P − g)/K")
    step_axis(ax)
    noise_axis(ax).legend()
    ax.set_ylabel(NOISE + _BY_TOKENS)
    return ax


def _comparable(table: pandas.DataFrame, with_exact: bool = False) -> tuple[pandas.DataFrame, str]:
    """Return the rows over sequences, or all rows if there are none, and a suffix for the label of the axis."""
    if "samples" not in table.columns:
        return table, ""
    by_sequences = table["samples"] == SEQUENCES
    if not by_sequences.any():
        return table, _BY_TOKENS
    return table.loc[by_sequences | (with_exact & (table["noise"] == 0))], ""


def _places(names: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Split each name into the layer's number (−1 if none) and the module, with a prefix if the stems differ."""
    found = {name: re.match(r"(?:(.*?)\.)?(\d+)(?:\.(.+))?$", name) for name in names}
    short = _short_stems({match[1] or "" for match in found.values() if match})
    return {
        name: (int(match[2]), ".".join(filter(None, (short[match[1] or ""], match[3])))) if match else (-1, name)
        for name, match in found.items()
    }


def _short_stems(stems: set[str]) -> dict[str, str]:
    """Strip the parts that all stems have in common at either end; a single stem becomes empty."""
    parts = {stem: stem.split(".") for stem in stems}
    for end in (0, -1):
        while len(parts) > 1 and all(map(len, parts.values())) and len({part[end] for part in parts.values()}) == 1:
            for part in parts.values():
                part.pop(end)
    return {stem: ".".join(part) if len(parts) > 1 else "" for stem, part in parts.items()}


if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

NOISE = "variance ratio, sketch / minibatch"
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
    ax.axhline(1, color="black", linewidth=1, linestyle="--", label="as much as the minibatch")
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
