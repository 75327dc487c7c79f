"""What tables and pictures say of a method: which tasks, its scores and losses by the exact runs', its shares."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.frontier.means import mean_over_groups, text_of
from benchmarks.frontier.methods import EXACT, METHODS
from benchmarks.frontier.rows import Cost, Epoch

_SEEDS = 3
TITLES = {"sst2": "SST-2", "cola": "CoLA", "stsb": "STS-B", "rte": "RTE"}
# Runs begin on a plateau, and when they leave it moves scores and losses ten times as far as methods do elsewhere: in a
# mean over tasks, nothing else would be seen.
_APART = ("stsb",)


def tasks_of(epochs: Sequence[Epoch], costs: Sequence[Cost]) -> list[str]:
    """Return the tasks that tables and pictures show: a mean over tasks that some methods lack is not comparable.

    Args:
        epochs: All runs.
        costs: All measurements of steps.

    Returns:
        Those that all methods were trained on with three seeds or more; if there is none yet, all that have costs.
    """
    there = [task for task in TITLES if any(row.task == task for row in costs)]
    return [task for task in there if len(_common(epochs, costs, task)) >= _SEEDS] or there


def together_and_apart(tasks: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return over which tasks means are taken, and which stand beside these means.

    Args:
        tasks: That are shown.

    Returns:
        Both; if there are none but those that would stand apart, means are theirs.
    """
    together = [task for task in tasks if task not in _APART]
    return (together, [task for task in tasks if task in _APART]) if together else ([*tasks], [])


def comparable(epochs: Sequence[Epoch], costs: Sequence[Cost]) -> list[Epoch]:
    """Return the runs that tables and pictures compare: rows of other seeds are not comparable either.

    Args:
        epochs: All runs.
        costs: All measurements of steps.

    Returns:
        On every task that has three seeds or more that all methods have, the runs of these seeds; on others, all.
    """
    seeds = {task: _common(epochs, costs, task) for task in TITLES}
    return [row for row in epochs if len(seeds.get(row.task, ())) < _SEEDS or row.seed in seeds[row.task]]


def _common(epochs: Sequence[Epoch], costs: Sequence[Cost], task: str) -> set[int]:
    """The seeds that all methods were trained with."""
    methods = {EXACT if METHODS[row.method].is_exact else row.method for row in costs if row.task == task}
    last = [row for row in epochs if row.task == task and row.epoch == row.epochs]
    found = [{row.seed for row in last if row.method == method} for method in methods]
    return set.intersection(*found) if found else set()


def apart_of(epochs: Sequence[Epoch], task: str, method: str) -> list[float]:
    """Return by how much a method's scores are above the exact ones.

    Args:
        epochs: All runs.
        task: The task.
        method: The method.

    Returns:
        The score after the last epoch less the exact one's, of every seed that both have.
    """
    return [row.score - exact.score for row, exact in _pairs(epochs, task, method)]


def losses_apart_of(epochs: Sequence[Epoch], task: str, method: str) -> list[float]:
    """Return by what share a method's training losses are above the exact ones.

    Args:
        epochs: All runs.
        task: The task.
        method: The method.

    Returns:
        The last epoch's loss by the exact run's, less 1, of every seed that both have.
    """
    return [row.train_loss / exact.train_loss - 1 for row, exact in _pairs(epochs, task, method)]


def _pairs(epochs: Sequence[Epoch], task: str, method: str) -> list[tuple[Epoch, Epoch]]:
    """Last epochs of a method and of the exact run of the same seed."""
    last = {(row.method, row.seed): row for row in epochs if row.task == task and row.epoch == row.epochs}
    return [
        (row, last[EXACT, seed])
        for (name, seed), row in sorted(last.items())
        if name == method and (EXACT, seed) in last
    ]


def scores_of(epochs: Sequence[Epoch], task: str, method: str) -> list[float]:
    """Return what a method reaches after the last epoch.

    Args:
        epochs: All runs.
        task: The task.
        method: The method.

    Returns:
        The score of every seed.
    """
    return [row.score for row in epochs if (row.task, row.method, row.epoch) == (task, method, row.epochs)]


def share_of(costs: Sequence[Cost], tasks: Sequence[str], method: str, field: str) -> float | None:
    """Return a method's bytes or seconds by the exact step's.

    Args:
        costs: All measurements of steps.
        tasks: Over which shares are averaged.
        method: The method.
        field: Of :class:`benchmarks.frontier.rows.Cost`.

    Returns:
        The mean; None if a task does not have it: means over other tasks are not comparable.
    """
    found = list[float]()
    for task in tasks:
        rows = {row.method: getattr(row, field) for row in costs if row.task == task}
        value, exact = rows.get(method), rows.get(EXACT)
        if value is None or not exact:
            return None
        found.append(value / exact)
    return statistics.mean(found) if found else None


def score_text(epochs: Sequence[Epoch], tasks: Sequence[str], method: str) -> str:
    """Write the mean over tasks of what :func:`apart_of` returns, × 100; empty for exact gradients.

    Args:
        epochs: All runs.
        tasks: Over which scores are averaged.
        method: The method.

    Returns:
        As "+1.2 ± 0.3".
    """
    if METHODS[method].is_exact:
        return ""
    return text_of(mean_over_groups([apart_of(epochs, task, method) for task in tasks]), 1, factor=100, sign=True)


def loss_text(epochs: Sequence[Epoch], tasks: Sequence[str], method: str) -> str:
    """Write the mean over tasks of what :func:`losses_apart_of` returns, in per cent; empty for exact gradients.

    Args:
        epochs: All runs.
        tasks: Over which shares are averaged.
        method: The method.

    Returns:
        As "+1.2 ± 0.3 %".
    """
    if METHODS[method].is_exact:
        return ""
    found = mean_over_groups([losses_apart_of(epochs, task, method) for task in tasks])
    return f"{text_of(found, 1, factor=100, sign=True)} %" if found else ""


def share_text(share: float | None, field: str) -> str:
    """Write a share.

    Args:
        share: Of :func:`share_of`.
        field: What it is a share of.

    Returns:
        Of times as "1.05", of bytes as "12 %"; empty if there is none.
    """
    if share is None:
        return ""
    return f"{share:.2f}" if field.endswith("time") else f"{100 * share:.0f} %"
