"""Pictures of the suites' csv files, next to them.

Providers differ by marker and line, not by colour alone, so that a grey print can be read.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import figure_of, headed
from benchmarks.records import RESULTS, Row, read_rows
from benchmarks.suites import growth

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
    """Plot every csv file of a folder; each picture has the name of its file."""
    yield from map(str, plot_all(arguments.out))


def plot_all(results: Path) -> list[Path]:
    """Plot every csv file of a folder, and return the pictures."""
    makers = {"linear": plot_linear, "model": plot_model, "kernels": plot_kernels, "growth": plot_growth}
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
    """Plot a layer's time against the ratio, with the limit (2 + ratio) / 3 of a free sketch, as a figure."""
    panels = list(dict.fromkeys((row.dtype, row.case) for row in rows))
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure, axes = figure_of(down, across)
    points = {(row.provider, row.ratio) for row in rows if row.provider != "nn.Linear"}
    # What was measured at one ratio only stands in the table.
    lines = Counter(provider for provider, _ in points)
    few = max(lines.values()) == 1
    providers = [p for p in dict.fromkeys(row.provider for row in rows) if lines[p] > 1 or (few and lines[p])]
    styles = {provider: _style(number) for number, provider in enumerate(providers)}
    for (dtype, case), axis in zip(panels, axes, strict=False):
        here = [row for row in rows if (row.dtype, row.case) == (dtype, case)]
        for provider in providers:
            _line(axis, styles, provider, [(r.ratio, r.relative) for r in here if r.provider == provider])
        ratios = sorted({row.ratio for row in here})
        axis.plot(ratios, [(2 + ratio) / 3 for ratio in ratios], **_LIMIT)
        axis.axhline(1, **_REFERENCE)
        axis.set(
            xscale="log",
            yscale="log",
            title=f"{case}, {dtype}",
            xlabel="rows kept, of packed sketches bytes, relative to the input",
        )
        axis.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel("forward + backward, time relative to nn.Linear")
        _plain_ticks(axis, [r.relative for r in here if r.relative] + [0.6, 1.0])
    handles = _handles(styles, {"limit (2 + ratio) / 3": _LIMIT, "nn.Linear": _REFERENCE})
    return _finished(figure, rows, handles, "Time of one layer")


def plot_model(rows: Sequence[Row]) -> Any:
    """Plot the bytes kept for the backward pass against the time of a training step, as a figure."""
    panels = list(dict.fromkeys((row.dtype, row.case) for row in rows))
    figure, axes = figure_of(1, len(panels), width=6.4, height=4.6)
    for (dtype, case), axis in zip(panels, axes, strict=False):
        here = [r for r in rows if (r.dtype, r.case) == (dtype, case) and r.kept_bytes is not None and r.median]
        base = next((r.median for r in here if r.provider == "exact"), None) or 1.0
        for number, row in enumerate(here):
            marker, _, color = _style(number)
            low, middle, high = ((value or 0) / base for value in (row.lower, row.median, row.upper))
            kept = (row.kept_bytes or 0) / _MIB
            axis.errorbar(
                [middle], [kept], xerr=[[middle - low], [high - middle]], color=color, marker=marker, markersize=9,
                capsize=3, label=row.provider,
            )  # fmt: skip
        axis.axvline(1, **_REFERENCE, label="time of the exact step: no slower than this")
        free = min((row.kept_bytes or 0) for row in here if not row.provider.startswith("torch checkpoint")) / _MIB
        axis.axhline(free, **_LIMIT, label="fewest bytes without recomputing")
        axis.set(title=f"{case}, {dtype}", xlabel="step time relative to exact (median, quartiles)")
        axis.set_ylabel("activation memory, MiB")
        axis.set_ylim(bottom=0)
        axis.margins(x=0.1)
        axis.legend(fontsize=8, loc="best")
    return _finished(figure, rows, [], "Memory and time of a training step: left and low is better")


def plot_kernels(rows: Sequence[Row]) -> Any:
    """Plot every kernel's bytes per second against the size of its matrix, with the copy's, as a figure."""
    panels = list(dict.fromkeys((row.dtype, row.case.split(" x ")[1]) for row in rows))
    panels = [p for p in panels if len({r.case for r in rows if (r.dtype, r.case.split(" x ")[1]) == p}) > 1] or panels
    figure, axes = figure_of(1, len(panels), width=5.4, height=4.4)
    providers = [p for p in dict.fromkeys(row.provider for row in rows) if p != "copy"]
    styles = {provider: _style(number) for number, provider in enumerate(providers)}
    for (dtype, columns), axis in zip(panels, axes, strict=False):
        here = [row for row in rows if (row.dtype, row.case.split(" x ")[1]) == (dtype, columns)]
        points: dict[str, list[tuple[float, float | None]]] = {}
        for row in here:
            size = int(row.case.split(" x ")[0]) * int(columns) * (4 if dtype == "float32" else 2) / _MIB
            points.setdefault(row.provider, []).append((size, (row.moved_bytes or 0) / (row.median or 1) / 1e9))
        for provider in providers:
            _line(axis, styles, provider, points.get(provider, []))
        limit = sorted(points.get("copy", []))
        axis.plot([x for x, _ in limit], [y for _, y in limit], **_LIMIT)
        axis.set(xscale="log", yscale="log", title=f"{dtype}, {columns} columns", xlabel="size of the matrix, MiB")
        sizes = sorted({x for found in points.values() for x, _ in found})
        axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel("bytes that must be moved per second, GB/s")
        _plain_ticks(axis, [y for found in points.values() for _, y in found if y])
    return _finished(figure, rows, _handles(styles, {"copy: the limit": _LIMIT}), "Bandwidth of the kernels")


def plot_growth(rows: Sequence[Row]) -> Any:
    """Plot the time per token against the number of tokens, by that of the base case, as a figure."""
    figure, (axis,) = figure_of(1, 1, width=6.4, height=4.2)
    found = growth.per_token(rows)
    providers = list(dict.fromkeys(name for name, _ in found))
    styles = {provider: _style(number) for number, provider in enumerate(providers)}
    for provider in providers:
        _line(axis, styles, provider, [(tokens, share) for (name, tokens), share in found.items() if name == provider])
    axis.axhspan(0.9, 1.1, color="0.9", zorder=0)
    tokens = sorted({tokens for _, tokens in found})
    axis.set(xscale="log", xlabel="tokens", title=f"width {rows[0].case.split(' x ')[1]}, {rows[0].dtype}")
    axis.set_ylabel(f"time per token relative to {growth.BASE:,} tokens")
    axis.set_xticks(tokens, [f"{count:,}" for count in tokens], rotation=30)
    axis.set_xticks([], minor=True)
    axis.set_ylim(bottom=0)
    band = {"color": "0.9", "linewidth": 6}
    return _finished(figure, rows, _handles(styles, {"within a tenth": band}), "Growth with the number of tokens")


def _style(number: int) -> tuple[str, str, str]:
    """Marker, line and colour; after the last marker the first comes again, with another line and colour."""
    marker, again = _STYLES[number % len(_STYLES)][0], 3 * (number // len(_STYLES))
    return marker, *_STYLES[(number + again) % len(_STYLES)][1:]


def _line(axis: Any, styles: dict[str, Any], provider: str, points: Sequence[tuple[float, float | None]]) -> None:
    found = sorted((x, y) for x, y in points if y is not None)
    marker, line, color = styles[provider]
    axis.plot([x for x, _ in found], [y for _, y in found], marker=marker, linestyle=line, color=color, markersize=5)


def _plain_ticks(axis: Any, values: Sequence[float]) -> None:
    """Ticks of a logarithmic axis as numbers, a few per decade."""
    low, high = min(values), max(values)
    steps = [step * 10.0**power for power in range(-3, 6) for step in (1, 1.5, 2, 3, 4, 6, 8)]
    chosen = [step for step in steps if low / 1.2 <= step <= high * 1.2]
    chosen = chosen if len(chosen) <= 8 else [s for s in chosen if f"{s:e}"[0] in "13" and f"{s:e}"[2] == "0"]
    axis.set_yticks(chosen, [f"{step:g}" for step in chosen])
    axis.set_yticks([], minor=True)
    axis.set_xticks([], minor=True)
    axis.grid(color="0.9", linewidth=0.6)


def _handles(styles: dict[str, Any], lines: dict[str, dict[str, Any]]) -> list[Any]:
    """Entries of a legend: of the providers, and of other lines by their titles."""
    from matplotlib.lines import Line2D

    shown = {
        "paper (dense Gaussian)" if provider == "paper" else provider: {"marker": marker, "ls": line, "color": color}
        for provider, (marker, line, color) in styles.items()
    }
    return [Line2D([], [], label=title, **options) for title, options in (shown | lines).items()]


def _finished(figure: Any, rows: Sequence[Row], handles: list[Any], title: str) -> Any:
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9)
    return headed(figure, title, rows)
