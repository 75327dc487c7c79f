"""What tables and pictures say of methods: tasks and seeds that can be compared, means over both and their errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.frontier.methods import EXACT, METHODS
from benchmarks.frontier.rows import Cost, Epoch


def mean_and_error(values: Sequence[float]) -> tuple[float, float] | None:
    if not values:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def mean_over_groups(groups: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Return the mean of the means of groups, which need not be of one size, and its standard error."""
    found = [mean_and_error(values) for values in groups]
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found):
        return None
    return statistics.mean(mean for mean, _ in known), math.hypot(*(error for _, error in known)) / len(known)


def text_of(found: tuple[float, float] | None, digits: int, *, factor: float = 1, sign: bool = False) -> str:
    """Write a mean, with its standard error where it is known."""
    if found is None:
        return ""
    mean, error = found
    after = "" if math.isnan(error) else f" ± {factor * error:.{digits}f}"
    return format(factor * mean, f"{'+' if sign else ''}.{digits}f").replace("-", "−") + after


def mean_text(values: Sequence[float], digits: int, *, factor: float = 1, sign: bool = False) -> str:
    return text_of(mean_and_error(values), digits, factor=factor, sign=sign)


_SEEDS = 3
_TASKS = {"sst2": "SST-2", "cola": "CoLA", "stsb": "STS-B", "rte": "RTE"}
BFLOAT16 = "-bf16"  # how the names of tasks end that are trained in bfloat16
TITLES = {f"{task}{end}": title for end in ("", BFLOAT16) for task, title in _TASKS.items()}
# Runs begin on a plateau, and when they leave it moves scores and losses ten times as far as methods do elsewhere: in a
# mean over tasks, nothing else would be seen.
_APART = ("stsb", f"stsb{BFLOAT16}")


def tasks_of(epochs: Sequence[Epoch], costs: Sequence[Cost], end: str = "") -> list[str]:
    """Return the tasks that tables and pictures show: a mean over tasks that some methods lack is not comparable.

    ``end`` is how their names end: those of one kind of numbers are compared.
    """
    there = [f"{task}{end}" for task in _TASKS if any(row.task == f"{task}{end}" for row in costs)]
    return [task for task in there if len(_common(epochs, costs, task)) >= _SEEDS] or there


def together_and_apart(tasks: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return over which tasks means are taken, and which stand beside these means."""
    together = [task for task in tasks if task not in _APART]
    return (together, [task for task in tasks if task in _APART]) if together else ([*tasks], [])


def comparable(epochs: Sequence[Epoch], costs: Sequence[Cost]) -> list[Epoch]:
    """Return the runs that tables and pictures compare: rows of other seeds are not comparable either."""
    seeds = {task: _common(epochs, costs, task) for task in TITLES}
    there = {(row.task, row.method, row.seed) for row in epochs if row.epoch == row.epochs}

    def is_one(row: Epoch) -> bool:
        common = seeds.get(row.task, ())
        is_whole = all((row.task, row.method, seed) in there for seed in common)
        return len(common) < _SEEDS or (row.seed in common and is_whole)

    return [row for row in epochs if is_one(row)]


def _common(epochs: Sequence[Epoch], costs: Sequence[Cost], task: str) -> set[int]:
    methods = {EXACT if METHODS[row.method].is_exact else row.method for row in costs if row.task == task}
    last = [row for row in epochs if row.task == task and row.epoch == row.epochs]
    found = [{row.seed for row in last if row.method == method} for method in methods]
    # Of a method that was not trained yet with so many seeds, costs alone are shown.
    whole = [seeds for seeds in found if len(seeds) >= _SEEDS] or [seeds for seeds in found if seeds]
    return set.intersection(*whole) if whole else set()


def apart_of(epochs: Sequence[Epoch], task: str, method: str) -> list[float]:
    """Return by how much a method's scores are above the exact ones."""
    return [row.score - exact.score for row, exact in _pairs(epochs, task, method)]


def losses_apart_of(epochs: Sequence[Epoch], task: str, method: str) -> list[float]:
    """Return by what share a method's training losses are above the exact ones."""
    return [row.train_loss / exact.train_loss - 1 for row, exact in _pairs(epochs, task, method)]


def _pairs(epochs: Sequence[Epoch], task: str, method: str) -> list[tuple[Epoch, Epoch]]:
    """Last epochs of a method and of the exact run of the same seed."""
    last = {(row.method, row.seed): row for row in epochs if row.task == task and row.epoch == row.epochs}
    seeds = sorted(seed for name, seed in last if name == method and (EXACT, seed) in last)
    return [(last[method, seed], last[EXACT, seed]) for seed in seeds]


def scores_of(epochs: Sequence[Epoch], task: str, method: str) -> list[float]:
    return [row.score for row in epochs if (row.task, row.method, row.epoch) == (task, method, row.epochs)]


def share_of(costs: Sequence[Cost], tasks: Sequence[str], method: str, field: str) -> float | None:
    """Return a method's bytes or seconds by the exact step's; of bytes elsewhere, by those that it keeps."""
    found = list[float]()
    for task in tasks:
        rows = {row.method: row for row in costs if row.task == task}
        value = getattr(rows.get(method), field, None)
        exact = getattr(rows.get(EXACT), "kept" if field == "host" else field, None)
        if value is None or not exact:
            return None
        found.append(value / exact)
    return statistics.mean(found) if found else None


def score_text(epochs: Sequence[Epoch], tasks: Sequence[str], method: str) -> str:
    """Write the mean over tasks of what :func:`apart_of` returns, × 100."""
    return text_of(mean_over_groups([apart_of(epochs, task, method) for task in tasks]), 1, factor=100, sign=True)


def loss_text(epochs: Sequence[Epoch], tasks: Sequence[str], method: str) -> str:
    """Write the mean over tasks of what :func:`losses_apart_of` returns, in per cent."""
    found = mean_over_groups([losses_apart_of(epochs, task, method) for task in tasks])
    return f"{text_of(found, 1, factor=100, sign=True)} %" if found else ""


def share_text(share: float | None, field: str) -> str:
    if share is None:
        return ""
    return f"{share:.2f}" if field.endswith("time") else f"{100 * share:.0f} %"
