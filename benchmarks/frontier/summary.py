"""The first table of README, from the csv files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.frontier.compared import (
    APART,
    TITLES,
    apart_of,
    comparable,
    loss_text,
    score_text,
    share_of,
    share_text,
    tasks_of,
)
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
    tasks = tasks_of(epochs, costs)
    epochs = [row for row in comparable(epochs, costs) if row.task in tasks]
    costs = [row for row in costs if row.task in tasks]
    together, alone = ([task for task in tasks if (task in APART) is is_apart] for is_apart in (False, True))
    lines = list[tuple[str, ...]]()
    for method in _METHODS:
        how = METHODS[method]
        shares = [share_text(share_of(costs, tasks, method, field), field) for field in _FIELDS]
        apart = [score_text(epochs, together, method), loss_text(epochs, together, method)]
        apart += [score_text(epochs, [task], method) for task in alone]
        apart = ["0" for _ in apart] if how.is_exact else apart
        title = f"**{how.title}**" if method == "tenth" else how.title
        lines.append((title, *shares, *apart))
    names = ["", "kept", "peak", "time", "time, 32 rows", "score", "training loss"]
    names += [f"score, {TITLES[task]}" for task in alone]
    noisy = [method for method in _METHODS if not METHODS[method].is_exact]
    counts = sorted({len(apart_of(epochs, task, method)) for task in tasks for method in noisy})
    of = f"{counts[-1]} seed{'' if counts[-1] == 1 else 's'}"
    some = f"{counts[0]} to {of}" if counts[0] else f"up to {of}; without a score, runs are not there yet"
    scored = of if counts[0] == counts[-1] else some
    means = f"Means over {_names(tasks)}"
    means += f", of scores and losses over {_names(together)}" if alone and together else ""
    means += f"; {scored}."
    return f"{table(names, lines)}\n\n{means} {origins([*costs, *epochs])}"


def _names(tasks: Sequence[str]) -> str:
    return ", ".join(TITLES[task] for task in tasks)
