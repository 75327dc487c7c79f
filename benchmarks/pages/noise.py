"""The tables of ``docs/noise.md`` and ``docs/estimators.md``."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.pages.render import Table, from_csv, pivot
from benchmarks.records import Sampled, Surveyed
from rmm_linear._support.tables import table
from rmm_linear.sketches import SAMPLERS

_TITLES = {"none": '"none": nothing else', "oracle": "the true ‖y‖"}


def digits(noise: float) -> str:
    """Write a ratio of variances with two significant digits or so."""
    return f"{noise:.{1 if noise >= 10 else 2 if noise >= 0.095 else 3}f}"


def _survey(rows: Sequence[Surveyed]) -> str:
    """Lay out settings down, tasks and memory across."""
    return pivot(
        rows,
        lambda row: row.setting,
        lambda row: f"{row.task}: {100 * row.memory:g} %",
        lambda row: digits(row.noise),
        corner="bytes relative to the input",
    )


def _sampling(rows: Sequence[Sampled]) -> str:
    """Lay out norm estimators down, tasks and kinds across; kinds without an estimator below, in both columns."""
    tasks = dict.fromkeys(row.task for row in rows)
    cells = {(row.kind, row.norm_estimator, row.task): f"{row.noise:.2f}" for row in rows}
    names = dict.fromkeys(row.norm_estimator for row in rows if row.norm_estimator)
    lines = [
        (_TITLES.get(name, f'"{name}"'), *(cells[kind, name, task] for task in tasks for kind in SAMPLERS))
        for name in names
    ]
    for kind in ("rows", "countsketch"):
        lines.append((f"for comparison, `{kind}`", *(cells[kind, "", task] for task in tasks for _ in SAMPLERS)))
    return table(("rows sampled by ‖x‖ and", *(f"{task}: {kind}" for task in tasks for kind in SAMPLERS)), lines)


TABLES: dict[str, Table] = {
    "noise": from_csv("noise", Surveyed, _survey),
    "sampling": from_csv("sampling", Sampled, _sampling),
}
