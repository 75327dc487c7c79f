"""What tables and pictures say of a method: which tasks, its scores and losses by the exact runs', its shares."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.frontier.means import mean_over_groups, text_of
from benchmarks.frontier.methods import EXACT, METHODS
from benchmarks.frontier.rows import Cost, Epoch

_SEEDS = 3
TITLES = {"sst2": "SST-2", "cola": "CoLA", "stsb": "STS-B", "rte": "RTE"}


def tasks_of(epochs: Sequence[Epoch], costs: Sequence[Cost]) -> list[str]:
    """Return the tasks that tables and pictures show: a mean over tasks that some methods lack is not comparable.

    Args:
        epochs: All runs.
        costs: All measurements of steps.

    Returns:
        Those that all methods were trained on with three seeds or more; if there is none yet, all that have costs.
    """

    def seeds(row: Cost) -> int:
        return len(scores_of(epochs, row.task, EXACT if METHODS[row.method].is_exact else row.method))

    there = [task for task in TITLES if any(row.task == task for row in costs)]
    return [task for task in there if min(seeds(row) for row in costs if row.task == task) >= _SEEDS] or there


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
