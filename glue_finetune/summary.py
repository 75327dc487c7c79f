"""The outcome of a comparison: comparison.csv (a row per run), comparison.md (the table) and comparison.png."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from rmm_linear._support.files import replacing, write_text

BASELINE = "exact"
MIB = 2**20
_MARKERS = "os^Dv<>Pp*Xh"
_NOTES = """
- score: mean ± standard deviation (number of seeds) of {metric}; best is each run's best epoch, last its last one
- kept: memory that one training step keeps for the backward pass (step {step} of each run), parameters excluded
- peak: highest memory of the run's own process ({peak_of})
- seconds per step: median over the run's steps; ratios are against {baseline}
"""


def write_summary(folder: Path, results: dict[tuple[str, int], dict[str, Any]], command: str) -> str:
    """Write comparison.csv, comparison.md and comparison.png.

    Args:
        folder: Where to.
        results: Label and seed of each run to the content of its results.json.
        command: The command line that made them.

    Returns:
        The table and where the files are, as text to print.
    """
    runs = collect_runs(results)
    table = summarize(runs)
    first = next(iter(results.values()))
    metric = first["score"]["metric"]
    notes = _NOTES.format(
        metric=metric,
        step=first["memory"]["at_step"],
        peak_of=first["memory"]["peak_of"],
        baseline=BASELINE if BASELINE in table.index else f"{BASELINE}, which was not run",
    )
    text = format_table(table)
    write_text(folder / "comparison.csv", runs.to_csv(index=False))
    write_text(folder / "comparison.md", f"# {first['task']}: {metric}\n\n{text}\n{notes}\n```\n{command}\n```\n")
    with replacing(folder / "comparison.png") as temporary:
        plot(table, metric, first["task"]).savefig(temporary, dpi=150)
    files = "\n".join(f"  {folder / name}" for name in ("comparison.csv", "comparison.md", "comparison.png"))
    return f"{text}\n{notes}\n{files}"


def collect_runs(results: dict[tuple[str, int], dict[str, Any]]) -> pd.DataFrame:
    """Make one row per run.

    Args:
        results: See :func:`write_summary`.

    Returns:
        The rows of comparison.csv; memory in bytes, time in seconds.
    """
    rows = []
    for (label, seed), result in results.items():
        score, memory = result["score"], result["memory"]
        rows.append(
            {
                "setting": label,
                "seed": seed,
                "task": result["task"],
                "metric": score["metric"],
                "best": score["best"],
                "best_epoch": score["best_epoch"],
                "last": score["last"],
                "bytes_kept": memory["bytes_kept_for_backward"],
                "seconds_per_step": result["seconds_per_step"]["median"],
                "peak_bytes": memory["peak_bytes"],
                "peak_of": memory["peak_of"],
                **{f"version_{name}": version for name, version in result["versions"].items()},
                "commit": result["commit"],
            }
        )
    numbers = ["best", "best_epoch", "last", "bytes_kept", "seconds_per_step", "peak_bytes"]
    return pd.DataFrame(rows).astype(dict.fromkeys(numbers, float))


def summarize(runs: pd.DataFrame) -> pd.DataFrame:
    """Average over the seeds.

    Args:
        runs: See :func:`collect_runs`.

    Returns:
        A row per setting, in the order of the runs: "n", mean and "_std" of "best" and "last", means of the costs, and
        "bytes_ratio" and "seconds_ratio" against the exact setting (NaN without one).
    """
    groups = runs.groupby("setting", sort=False)
    columns: dict[str, Any] = {"n": groups.size()}
    for name in ("best", "last"):
        columns[name] = groups[name].mean()
        columns[f"{name}_std"] = groups[name].std(ddof=1)
    for name in ("bytes_kept", "seconds_per_step", "peak_bytes"):
        columns[name] = groups[name].mean()
    table = pd.DataFrame(columns)
    for name, column in (("bytes_ratio", "bytes_kept"), ("seconds_ratio", "seconds_per_step")):
        table[name] = table[column] / table[column].to_dict().get(BASELINE, math.nan)
    return table


def format_table(table: pd.DataFrame) -> str:
    """Write the summary as a table that reads well as it is and in Markdown.

    Args:
        table: See :func:`summarize`.

    Returns:
        The lines of the table.
    """
    header = ("setting", "best score", "last score", "kept, MiB", "of exact", "s/step of exact", "peak, MiB")
    rows = [
        (
            str(label),
            _with_error(row["best"], row["best_std"], row["n"]),
            _with_error(row["last"], row["last_std"], row["n"]),
            _number(row["bytes_kept"] / MIB, ".1f"),
            _number(row["bytes_ratio"], ".1%"),
            _number(row["seconds_ratio"], ".2f"),
            _number(row["peak_bytes"] / MIB, ".0f"),
        )
        for label, row in table.to_dict("index").items()
    ]
    widths = [max(len(line[place]) for line in (header, *rows)) for place in range(len(header))]

    def line(cells: tuple[str, ...]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return f"| {first[0]:<{first[1]}} | " + " | ".join(f"{cell:>{width}}" for cell, width in rest) + " |"

    rule = f"|:{'-' * (widths[0] + 1)}|" + "|".join(f"{'-' * (width + 1)}:" for width in widths[1:]) + "|"
    return "\n".join((line(header), rule, *map(line, rows)))


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "–"


def _with_error(mean: float, deviation: float, count: float) -> str:
    spread = f" ± {deviation:.4f}" if math.isfinite(deviation) else ""
    return f"{_number(mean, '.4f')}{spread} ({int(count)})"


def plot(table: pd.DataFrame, metric: str, task: str) -> Figure:
    """Draw score against memory; markers and labels tell the settings apart, not colours.

    Args:
        table: See :func:`summarize`.
        metric: Name of the metric.
        task: Name of the task.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    if BASELINE in table.index:
        axes.axhline(table["best"].to_dict()[BASELINE], color="0.6", linestyle="--", linewidth=1, zorder=0)
    for place, (label, row) in enumerate(table.to_dict("index").items()):
        kept = row["bytes_kept"] / MIB
        error = row["best_std"] if math.isfinite(row["best_std"]) else None
        axes.errorbar(
            kept, row["best"], yerr=error, fmt=_MARKERS[place % len(_MARKERS)], markersize=8, capsize=4,
            color="0.15", markerfacecolor="white" if place % 2 else "0.15",
        )  # fmt: skip
        axes.annotate(str(label), (kept, row["best"]), xytext=(9, 6), textcoords="offset points")
    axes.set_xlim(0, 1.25 * table["bytes_kept"].max() / MIB)
    axes.margins(y=0.2)
    seeds = int(table["n"].max())
    axes.set_xlabel("kept for the backward pass of one step (MiB)")
    axes.set_ylabel(f"{metric.replace('_', ' ')}, best epoch (mean{' ± std' if seeds > 1 else ''}, n = {seeds})")
    axes.set_title(f"task {task}")
    axes.grid(alpha=0.3)
    return figure
