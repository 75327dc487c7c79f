"""Pictures of the comparison: scores and times against bytes, and curves with bands."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.figures import BLUE, GREEN, RED, distinct, figure_of, legend_of
from benchmarks.frontier import aggregate as compared
from benchmarks.frontier.aggregate import mean_and_error, mean_over_groups
from benchmarks.frontier.methods import EXACT, METHODS
from benchmarks.frontier.rows import Cost, Epoch, Point
from benchmarks.frontier.study import TITLES

_TITLES = {"sst2": "SST-2, accuracy", "cola": "CoLA, Matthews", "stsb": "STS-B, Pearson", "rte": "RTE, accuracy"}
_GROUPS = {"exact": ("s", "black"), "published": ("^", RED), "fewer parameters": ("D", BLUE), "ours": ("o", GREEN)}
_SIZE = 6  # of names, in points
_PLACES = ((4, 3), (4, -8), (-4, 3), (-4, -8), (4, 10), (4, -15), (-4, 10), (-4, -15))  # of names, by their point


def plot_frontier(epochs: Sequence[Epoch], costs: Sequence[Cost]) -> Any:
    """Plot scores, training losses and the time of a step against what lives between the two passes."""
    tasks = compared.tasks_of(epochs, costs)
    if not tasks:
        return None
    epochs, (together, _) = compared.comparable(epochs, costs), compared.together_and_apart(tasks)
    figure, axes = figure_of(3, 1, width=9.0, height=3.6)
    for method, how in METHODS.items():
        kept, time = (compared.share_of(costs, tasks, method, field) for field in ("kept", "time"))
        for axis, apart_by in zip(axes, (compared.apart_of, compared.losses_apart_of), strict=False):
            groups = [[0.0] if how.is_exact else apart_by(epochs, task, method) for task in together]
            apart = mean_over_groups(groups)
            if kept is not None and apart is not None:
                _mark(axis, method, 100 * kept, 100 * apart[0], 100 * apart[1])
        if kept is not None and time is not None:
            _mark(axes[2], method, 100 * kept, time)
    of, all_of = (f"mean of {', '.join(compared.TITLES[task] for task in some)}" for some in (together, tasks))
    axes[0].set(title=f"score × 100, difference to exact, {of}", ylabel="± standard error")
    axes[1].set(title=f"training loss relative to exact, %, {of}", ylabel="± standard error")
    axes[2].set(title=f"step time relative to exact, {all_of}", xlabel="activation memory relative to exact, %")
    return _named(figure, axes)


# Of the picture in README.
_NAMES = {
    EXACT: "exact",
    "checkpoint": "checkpointing",
    "checkpoint-offload": "checkpointing, offloaded",
    "tenth": "rmm_linear",
    "fit-25": "rmm_linear, fit",
    "lora": "LoRA",
    "gaussian-50": "Gaussian sketch",
    "fp8": "inductor, 8 bits",
}
_LOSSES = 10  # %, from which on a training loss has the last colour


def plot_readme(epochs: Sequence[Epoch], costs: Sequence[Cost]) -> Any:
    """Plot step time against activation memory, with the training loss as colour and the names of some methods."""
    tasks = compared.tasks_of(epochs, costs)
    if not tasks:
        return None
    epochs, (together, _) = compared.comparable(epochs, costs), compared.together_and_apart(tasks)
    figure, (axis,) = figure_of(1, 1, width=7.0, height=3.2)
    points = None
    for method, how in METHODS.items():
        kept, time = (compared.share_of(costs, tasks, method, field) for field in ("kept", "time"))
        losses = [[0.0] if how.is_exact else compared.losses_apart_of(epochs, task, method) for task in together]
        loss, name = mean_over_groups(losses), _NAMES.get(method)
        if kept is None or time is None or loss is None:
            continue
        look = {"marker": _GROUPS[how.group][0], "s": 70 if name else 25, "edgecolors": "0.3", "linewidths": 0.6}
        colors = {"c": [100 * loss[0]], "cmap": "viridis_r", "vmin": 0, "vmax": _LOSSES}
        points = axis.scatter([100 * kept], [time], **look, **colors)
        if name:
            at, weight = (10, -10) if method == "tenth" else (6, 6), "bold" if how.group == "ours" else "normal"
            axis.annotate(name, (100 * kept, time), at, textcoords="offset points", fontsize=9, fontweight=weight)
    axis.set(xlabel="activation memory relative to exact, %", ylabel="step time relative to exact", xlim=(0, 120))
    axis.set(yscale="log", ylim=(0.8, 2.7))
    axis.set_yticks((0.8, 1, 1.25, 1.5, 2, 2.5), ("0.8", "1", "1.25", "1.5", "2", "2.5"))
    axis.set_yticks([], minor=True)
    axis.grid(color="0.9", linewidth=0.6)
    axis.set_axisbelow(True)
    if points is not None:
        figure.colorbar(points, ax=axis, extend="max", label="training loss above exact, %")
    return figure


def plot_tasks(epochs: Sequence[Epoch], costs: Sequence[Cost]) -> Any:
    tasks = compared.tasks_of(epochs, costs)
    if not tasks:
        return None
    epochs = compared.comparable(epochs, costs)
    figure, axes = figure_of(len(tasks), 1, width=9.0, height=3.6)
    for task, axis in zip(tasks, axes, strict=True):
        for row in (row for row in costs if row.task == task and row.kept is not None):
            scored = EXACT if METHODS[row.method].is_exact else row.method
            found = mean_and_error(compared.scores_of(epochs, task, scored))
            if found is not None:
                _mark(axis, row.method, (row.kept or 0) / 1e6, 100 * found[0], 100 * found[1])
        axis.set(title=_TITLES[task], ylabel="× 100, ± standard error")
    axes[-1].set(xlabel="activation memory, MB")
    return _named(figure, axes)


def _named(figure: Any, axes: Sequence[Any]) -> Any:
    """Add the legend, and put names where they hide nothing."""
    legend_of(figure, axes, ncols=4)
    for axis in axes:
        axis.margins(x=0.12, y=0.08)  # for names
    figure.draw_without_rendering()  # places are known from now on
    for axis in axes:
        _spread(axis)
    return figure


def _mark(axis: Any, method: str, kept: float, value: float, error: float = math.nan) -> None:
    how = METHODS[method]
    marker, color = _GROUPS[how.group]
    bar = None if math.isnan(error) else error
    axis.errorbar(kept, value, yerr=bar, marker=marker, color=color, capsize=2, linestyle="", label=how.group)
    axis.annotate(how.title, (kept, value), xytext=_PLACES[0], textcoords="offset points", fontsize=_SIZE, color=color)
    axis.grid(color="0.9", linewidth=0.6)


def _spread(axis: Any) -> None:
    """Put every name of an axis where it hides no point, no bar and no other name, or else where it hides fewest."""
    from matplotlib.transforms import Bbox

    points = [axis.transData.transform(name.xy) for name in axis.texts]
    taken = [Bbox.from_bounds(x - _SIZE / 2, y - _SIZE / 2, _SIZE, _SIZE) for x, y in points]
    bars = [bar for container in axis.containers for bar in container[2]]
    ends = [axis.transData.transform(segment) for bar in bars for segment in bar.get_segments()]
    bars = [Bbox.from_extents(low[0] - 1, low[1], high[0] + 1, high[1]) for low, high in ends]

    def hides(box: Any) -> tuple[bool, int, int]:
        is_outside = box.x0 < axis.bbox.x0 or box.x1 > axis.bbox.x1
        return is_outside, sum(map(box.overlaps, taken)), sum(map(box.overlaps, bars))

    for name in axis.texts:
        found = [_at(name, place) for place in _PLACES]
        taken.append(min(found, key=hides))
        _at(name, _PLACES[found.index(taken[-1])])


def _at(name: Any, place: tuple[int, int]) -> Any:
    """Put a name beside its point; return the box that it fills."""
    name.set_position(place)
    name.set_horizontalalignment("left" if place[0] > 0 else "right")
    return name.get_window_extent()


def plot_curves(points: Sequence[Point], batches: dict[str, int]) -> Any:
    """Plot the held-out loss of every study; exact runs with other batches are dashed, without bands."""
    studies = [study for study in batches if any(row.study == study for row in points)]
    figure, axes = figure_of(1, len(studies))
    every = [EXACT, *dict.fromkeys(row.method for row in points if row.method != EXACT)]
    colors = dict(zip(every, ["black", *distinct(len(every) - 1)], strict=True))
    for study, axis in zip(studies, axes, strict=False):
        by_run: dict[tuple[str, int], dict[int, list[float]]] = {}
        for row in (row for row in points if row.study == study):
            by_run.setdefault((row.method, row.batch), {}).setdefault(row.step, []).append(row.dev_loss)
        for (method, size), losses in by_run.items():
            if size == batches[study]:
                _banded(axis, losses, colors[method], METHODS[method].title)
                continue
            steps = sorted(losses)
            means = [statistics.mean(losses[step]) for step in steps]
            axis.plot(steps, means, color="0.5", linewidth=0.8, linestyle="--")
            how = {"textcoords": "offset points", "ha": "right", "fontsize": 6, "color": "0.4"}
            axis.annotate(f"exact, batch of {size}", (steps[-1], means[-1]), (0, 4), **how)
        axis.set(title=f"{TITLES[study]}; bands: least to most of seeds", ylabel="held-out loss", yscale="log")
        low, high = axis.get_ylim()
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}" if high < 10 * low else "")  # no power of ten may lie between them
    return _finished(figure, axes, "step")


def plot_long(epochs: Sequence[Epoch]) -> Any:
    figure, axes = figure_of(1, 3)
    exact = {(row.seed, row.epoch): row.train_loss for row in epochs if row.method == EXACT}
    every = [method for method in METHODS if any(row.method == method for row in epochs)]
    for method, color in zip(every, ["black", *distinct(len(every))], strict=False):
        apart, losses, scores = {}, {}, {}
        for row in (row for row in epochs if row.method == method):
            if (base := exact.get((row.seed, row.epoch))) is not None:
                apart.setdefault(row.epoch, []).append(100 * (row.train_loss / base - 1))
            losses.setdefault(row.epoch, []).append(row.fitted_loss or 0.0)
            scores.setdefault(row.epoch, []).append(100 * row.score)
        for axis, values in zip(axes, (apart, losses, scores), strict=True):
            _banded(axis, values, color, METHODS[method].title)
    axes[0].set(title="bands: least to most of seeds", ylabel="training loss, difference to exact, %")
    axes[1].set(title="without dropout", ylabel="loss on the training set", yscale="log")
    axes[2].set(title="dev set", ylabel="Matthews' correlation × 100")
    return _finished(figure, axes, "epoch")


def _banded(axis: Any, values: Mapping[int, Sequence[float]], color: Any, label: str) -> None:
    places = sorted(values)
    axis.plot(places, [statistics.mean(values[place]) for place in places], color=color, label=label)
    least, most = ([choose(values[place]) for place in places] for choose in (min, max))
    axis.fill_between(places, least, most, color=color, alpha=0.15, linewidth=0)


def _finished(figure: Any, axes: Sequence[Any], xlabel: str) -> Any:
    for axis in axes:
        axis.set(xlabel=xlabel)
        axis.grid(color="0.9", linewidth=0.6)
        axis.legend(fontsize=7)
    return figure
