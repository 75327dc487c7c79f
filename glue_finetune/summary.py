"""The outcome of a comparison: comparison.csv (a row per run), comparison.md (the table) and comparison.png."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from rmm_linear._support.files import replacing, write_text
from rmm_linear._support.tables import table as markdown

BASELINE = "exact"
MIB = 2**20
_MARKERS = "os^Dv<>Pp*Xh"
_NOTES = """
- score: {metric}, mean ± standard deviation (number of seeds); best is each run's best epoch, last its last one
- keep: what the sketched linear layers, and the whole model, keep from the forward to the backward pass of one training
  step (step {step} of each run), parameters excluded, and how much of that of {baseline} is saved
- time: median seconds per step, divided by those of {baseline}
- peak: highest memory of the run's own process ({peak_of})
"""


def write_summary(
    folder: Path, results: dict[tuple[str, int], dict[str, Any]], command: str
) -> tuple[str, pd.DataFrame]:
    """Write comparison.csv, comparison.md and comparison.png.

    Args:
        folder: Where to.
        results: Label and seed of each run to the content of its results.json.
        command: The command line that made them.

    Returns:
        The table and its notes, as text to print, and the numbers in it, see :func:`summarize`.
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
    text = f"{format_table(table)}\n{notes}"
    write_text(folder / "comparison.csv", runs.to_csv(index=False))
    write_text(folder / "comparison.md", f"# {first['task']}: {metric}\n\n{text}\n```\n{command}\n```\n")
    with replacing(folder / "comparison.png") as temporary:
        plot(table, metric, _title(first)).savefig(temporary, dpi=150)
    return text, table


def collect_runs(results: dict[tuple[str, int], dict[str, Any]]) -> pd.DataFrame:
    """Make the rows of comparison.csv, one per run, of :func:`write_summary`'s results; bytes and seconds."""
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
                "bytes_kept_by_layers": memory.get("bytes_kept_by_layers"),
                "seconds_per_step": result["seconds_per_step"]["median"],
                "peak_bytes": memory["peak_bytes"],
                "peak_of": memory["peak_of"],
                **{f"version_{name}": version for name, version in result["versions"].items()},
                "commit": result["commit"],
            }
        )
    numbers = ("best", "best_epoch", "last", "bytes_kept", "bytes_kept_by_layers", "seconds_per_step", "peak_bytes")
    return pd.DataFrame(rows).astype(dict.fromkeys(numbers, float))


def summarize(runs: pd.DataFrame) -> pd.DataFrame:
    """Average over the seeds.

    Args:
        runs: See :func:`collect_runs`.

    Returns:
        A row per setting, in the order of the runs: "n", mean and "_std" of "best" and "last", means of the costs, and
        "bytes_ratio", "layers_ratio" and "seconds_ratio" against the exact setting (NaN without one).
    """
    groups = runs.groupby("setting", sort=False)
    columns: dict[str, Any] = {"n": groups.size()}
    for name in ("best", "last"):
        columns[name] = groups[name].mean()
        columns[f"{name}_std"] = groups[name].std(ddof=1)
    ratios = {"bytes_kept": "bytes_ratio", "bytes_kept_by_layers": "layers_ratio", "seconds_per_step": "seconds_ratio"}
    for name in (*ratios, "peak_bytes"):
        columns[name] = groups[name].mean()
    table = pd.DataFrame(columns)
    for name, ratio in ratios.items():
        table[ratio] = table[name] / table[name].to_dict().get(BASELINE, math.nan)
    return table


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "–"


def _score(row: dict[str, float], name: str) -> str:
    deviation = row[f"{name}_std"]
    spread = f" ± {deviation:.4f}" if math.isfinite(deviation) else ""
    return f"{_number(row[name], '.4f')}{spread}" + (f" ({row['n']:.0f})" if row["n"] > 1 else "")


def _kept(row: dict[str, float], name: str, ratio: str) -> str:
    saved = f", {1 - row[ratio]:.1%} saved" if math.isfinite(row[ratio]) and row[ratio] != 1 else ""
    return f"{_number(row[name] / MIB, '.1f')} MiB{saved}"


COLUMNS: dict[str, Callable[[dict[str, float]], str]] = {
    "best score": lambda row: _score(row, "best"),
    "last score": lambda row: _score(row, "last"),
    "layers keep": lambda row: _kept(row, "bytes_kept_by_layers", "layers_ratio"),
    "whole model keeps": lambda row: _kept(row, "bytes_kept", "bytes_ratio"),
    "time": lambda row: _number(row["seconds_ratio"], ".2f"),
    "peak": lambda row: f"{_number(row['peak_bytes'] / MIB, '.0f')} MiB",
}


def format_table(table: pd.DataFrame, columns: dict[str, Callable[[dict[str, float]], str]] = COLUMNS) -> str:
    """Write a summary in Markdown; `columns` maps the title of each after the first to what makes a cell of a row."""
    rows: dict[Any, Any] = table.to_dict("index")
    return markdown(
        ("setting", *columns), [(str(label), *(cell(row) for cell in columns.values())) for label, row in rows.items()]
    )


def _title(result: dict[str, Any]) -> str:
    settings = result["settings"]
    model = Path(settings["model_name_or_path"]).name
    return f"{model} on {result['task']}, batches of {settings['per_device_train_batch_size']}"


def plot(table: pd.DataFrame, metric: str, title: str) -> Figure:
    """Plot score against memory; markers and labels tell the settings apart, not colours."""
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
    axes.set_title(title)
    axes.grid(alpha=0.3)
    return figure
