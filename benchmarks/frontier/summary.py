"""The first table of README, from the csv files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.frontier import compared
from benchmarks.frontier.methods import EXACT, METHODS
from benchmarks.frontier.page import NOTHING, origins
from benchmarks.frontier.rows import Cost, Epoch
from benchmarks.records import known_rows
from rmm_linear._support.tables import table

_METHODS = (
    EXACT, "checkpoint", "tenth", "narrow", "fit-25", "gact", "few-bits", "lora", "gaussian-50", "gaussian-10"
)  # fmt: skip
_FIELDS = ("kept", "peak", "time", "trained_time")


def summary(results: Path) -> str:
    """Make the table.

    Args:
        results: Folder of the csv files.

    Returns:
        A line for each of the chosen methods, and where they come from.
    """
    epochs = known_rows(results / "frontier-accuracy.csv", Epoch)
    costs = known_rows(results / "frontier-cost.csv", Cost)
    if not costs:
        return NOTHING
    tasks = compared.tasks_of(epochs, costs)
    epochs = [row for row in compared.comparable(epochs, costs) if row.task in tasks]
    costs = [row for row in costs if row.task in tasks]
    together, alone = compared.together_and_apart(tasks)
    lines = list[tuple[str, ...]]()
    for method in _METHODS:
        how = METHODS[method]
        shares = [compared.share_text(compared.share_of(costs, tasks, method, field), field) for field in _FIELDS]
        apart = [compared.score_text(epochs, together, method), compared.loss_text(epochs, together, method)]
        apart += [compared.score_text(epochs, [task], method) for task in alone]
        apart = ["0" for _ in apart] if how.is_exact else apart
        title = f"**{how.title}**" if method == "tenth" else how.title
        lines.append((title, *shares, *apart))
    names = ["", "kept", "peak", "time", "time, 32 rows", "score", "training loss"]
    names += [f"score, {compared.TITLES[task]}" for task in alone]
    noisy = [method for method in _METHODS if not METHODS[method].is_exact]
    counts = sorted({len(compared.apart_of(epochs, task, method)) for task in tasks for method in noisy})
    of = f"{counts[-1]} seed{'' if counts[-1] == 1 else 's'}"
    some = f"{counts[0]} to {of}" if counts[0] else f"up to {of}; without a score, runs are not there yet"
    scored = of if counts[0] == counts[-1] else some
    means = f"Means over {_names(tasks)}"
    means += f", of scores and losses over {_names(together)}" if alone else ""
    means += f"; {scored}."
    return f"{table(names, lines)}\n\n{means} {origins([*costs, *epochs])}"


def _names(tasks: Sequence[str]) -> str:
    return ", ".join(compared.TITLES[task] for task in tasks)
