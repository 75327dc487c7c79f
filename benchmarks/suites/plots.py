"""Pictures of the suites' csv files, next to them.

Providers differ by marker and line, not by colour alone, so that a grey print can be read.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import figure_of, headed, x_ticks
from benchmarks.records import RESULTS, Row, read_rows

_STYLES = (
    ("o", "-", "#000000"), ("s", "-", "#0072b2"), ("^", "--", "#d55e00"), ("D", "-.", "#009e73"),
    ("v", ":", "#cc79a7"), ("P", "--", "#56b4e9"), ("X", "-", "#e69f00"), ("*", ":", "#555555"),
)  # fmt: skip
_LIMIT = {"color": "0.4", "linewidth": 4, "alpha": 0.5}
_REFERENCE = {"color": "black", "linewidth": 1}
_MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the csv files")


def run(arguments: argparse.Namespace) -> Iterator[str]:
    yield from map(str, plot_all(arguments.out))


def plot_all(results: Path) -> list[Path]:
    makers = {"linear": plot_linear, "kernels": plot_kernels}
    pictures = []
    for suite, make in makers.items():
        for path in filter(Path.is_file, (results / f"{suite}-{device}.csv" for device in ("cpu", "cuda"))):
            rows = [row for row in read_rows(path, Row) if row.median is not None]
            if not rows:
                raise ValueError(f"plot needs times, and {path} has none: every provider failed.")
            pictures.append(path.with_suffix(".png"))
            make(rows).savefig(pictures[-1], dpi=150)
    if not pictures:
        raise ValueError(f"plot needs csv files in {results}, and there are none. Run python -m benchmarks run first.")
    return pictures


def plot_linear(rows: Sequence[Row]) -> Any:
    """Plot a layer's time against the ratio, with the limit (2 + ratio) / 3 of a free sketch."""
    points = {(row.provider, row.ratio) for row in rows if row.provider != "nn.Linear"}
    # What was measured at one ratio only stands in the table.
    counts = Counter(provider for provider, _ in points)
    few = max(counts.values()) == 1
    shown = [row for row in rows if counts[row.provider] > 1 or (few and counts[row.provider])]
    panels = _by_panel((f"{row.case}, {row.dtype}", row.provider, row.ratio, row.relative) for row in shown)
    figure, axes, styles = _lines(panels, width=4.6, height=3.9)
    for axis, found in zip(axes, panels.values(), strict=False):
        ratios = sorted({x for points in found.values() for x, _ in points})
        axis.plot(ratios, [(2 + ratio) / 3 for ratio in ratios], **_LIMIT)
        axis.axhline(1, **_REFERENCE)
        axis.set(xlabel="rows kept, of packed sketches bytes, relative to the input")
        _log_ticks(axis, ratios, [y for points in found.values() for _, y in points] + [0.6, 1.0])
    axes[0].set_ylabel("forward + backward, time relative to nn.Linear")
    extra = {"limit (2 + ratio) / 3": _LIMIT, "nn.Linear": _REFERENCE}
    return _finished(figure, rows, styles | extra, "Time of one layer")


def plot_kernels(rows: Sequence[Row]) -> Any:
    """Plot every kernel's bytes per second against the size of its matrix, with the copy's."""

    def point(row: Row) -> tuple[str, str, float, float]:
        tokens, columns = map(int, row.case.split(" x "))
        size = tokens * columns * (4 if row.dtype == "float32" else 2) / _MIB
        speed = (row.moved_bytes or 0) / (row.median or 1) / 1e9
        return f"{row.dtype}, {columns} columns", row.provider, size, speed

    every = _by_panel(map(point, rows))
    panels = {title: found for title, found in every.items() if any(len(each) > 1 for each in found.values())} or every
    limits = [found.pop("copy", []) for found in panels.values()]
    figure, axes, styles = _lines(panels, width=5.4, height=4.4)
    for axis, limit, found in zip(axes, limits, panels.values(), strict=False):
        axis.plot(*zip(*sorted(limit), strict=True), **_LIMIT)
        axis.set(xlabel="size of the matrix, MiB")
        every_point = [*limit, *(point for points in found.values() for point in points)]
        _log_ticks(axis, sorted({x for x, _ in every_point}), [y for _, y in every_point if y])
    axes[0].set_ylabel("bytes that must be moved per second, GB/s")
    return _finished(figure, rows, styles | {"copy: the limit": _LIMIT}, "Bandwidth of the kernels")


Points = dict[str, list[tuple[float, float]]]  # by provider


def _by_panel(points: Iterable[tuple[str, str, float, float | None]]) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for panel, provider, x, y in points:
        if y is not None:
            found.setdefault(panel, {}).setdefault(provider, []).append((x, y))
    return found


def _lines(panels: dict[str, Points], width: float, height: float) -> tuple[Any, list[Any], dict[str, Any]]:
    """Plot a line per provider; return the figure, its axes, and the styles of lines."""
    across = min(3, len(panels))
    figure, axes = figure_of(-(-len(panels) // across), across, width, height)
    providers = dict.fromkeys(provider for found in panels.values() for provider in found)
    styles = {provider: _style(number) for number, provider in enumerate(providers)}
    for axis, (title, found) in zip(axes, panels.items(), strict=False):
        axis.set(title=title)
        for provider, points in found.items():
            axis.plot(*zip(*sorted(points), strict=True), markersize=5, **styles[provider])
    return figure, axes, styles


def _style(number: int) -> dict[str, Any]:
    """Return marker, line and colour; after the last marker the first comes again, with another line and colour."""
    marker, again = _STYLES[number % len(_STYLES)][0], 3 * (number // len(_STYLES))
    _, line, color = _STYLES[(number + again) % len(_STYLES)]
    return {"marker": marker, "linestyle": line, "color": color}


def _log_ticks(axis: Any, places: Sequence[float], values: Sequence[float]) -> None:
    """Name the places of the x axis, and of the y axis a few numbers per decade."""
    x_ticks(axis, places, [f"{place:g}" for place in places])
    axis.set_yscale("log")
    low, high = min(values), max(values)
    steps = [step * 10.0**power for power in range(-3, 6) for step in (1, 1.5, 2, 3, 4, 6, 8)]
    chosen = [step for step in steps if low / 1.2 <= step <= high * 1.2]
    chosen = chosen if len(chosen) <= 8 else [s for s in chosen if f"{s:e}"[0] in "13" and f"{s:e}"[2] == "0"]
    axis.set_yticks(chosen, [f"{step:g}" for step in chosen])
    axis.set_yticks([], minor=True)
    axis.grid(color="0.9", linewidth=0.6)


def _finished(figure: Any, rows: Sequence[Row], lines: dict[str, Any], title: str) -> Any:
    from matplotlib.lines import Line2D

    titles = {"paper": "paper (dense Gaussian)"}
    handles = [Line2D([], [], label=titles.get(name, name), **style) for name, style in lines.items()]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9)
    return headed(figure, title, rows)
