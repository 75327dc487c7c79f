"""What both measurements of fit do: steps in turns, their peaks, and one fit for many budgets."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from rmm_linear._support.quiet import quiet
from rmm_linear.fitting.fitting import Fitting
from rmm_linear.fitting.report import FitReport
from rmm_linear.memory import peak
from rmm_linear.planning.blocks.plan import PlannedBlock
from rmm_linear.planning.step.step import copied, run_step

ROUNDS = 5
MAX_NOISE = 1.0
Run = Callable[[], None]


def step_of(model: nn.Module, batch: Any) -> Run:
    """Return a training step, whose gradients are left in the parameters.

    Args:
        model: The model.
        batch: A batch.

    Returns:
        A function that runs a forward and a backward pass.
    """
    there = copied(batch)
    return lambda: run_step(model, there)


def clear(model: nn.Module) -> None:
    """Free the gradients of a model.

    Args:
        model: The model.
    """
    model.zero_grad(set_to_none=True)


def live_peak(model: nn.Module, run: Run) -> int:
    """Return the live bytes that a step makes at its peak, gradients among them.

    Args:
        model: Its parameters get the gradients.
        run: The step.

    Returns:
        Bytes.
    """
    clear(model)
    with peak("cpu") as measured:
        run()
    clear(model)
    return measured.bytes


def medians(model: nn.Module, runs: Mapping[str, Run], rounds: int = ROUNDS) -> dict[str, float]:
    """Time steps in turns.

    Args:
        model: Its parameters get the gradients.
        runs: Title to step.
        rounds: How often every step's turn comes.

    Returns:
        Title to the median of its seconds.
    """
    return {title: statistics.median(seconds) for title, seconds in timed(model, runs, rounds).items()}


def timed(model: nn.Module, runs: Mapping[str, Run], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Time steps in turns, every second round in reverse order, after one step of each.

    Args:
        model: Its parameters get the gradients.
        runs: Title to step.
        rounds: How often every step's turn comes.

    Returns:
        Title to its seconds in every round.
    """
    found: dict[str, list[float]] = {title: [] for title in runs}
    for number in range(-1, rounds):
        for title in list(runs)[:: -1 if number % 2 else 1]:
            clear(model)
            begin = time.perf_counter()
            runs[title]()
            if number >= 0:
                found[title].append(time.perf_counter() - begin)
    clear(model)
    return found


def options_of(model: nn.Module, batch: Any, folder: str | None = None) -> Fitting:
    """Measure all options of a model's blocks, once for all budgets.

    Args:
        model: The model.
        batch: A training batch.
        folder: For offloaded blocks; without one, none is offloaded.

    Returns:
        A fit without a budget.
    """
    with quiet():
        fitting = Fitting(model, batch, None, folder=folder)
        fitting.add_options(MAX_NOISE)
    return fitting


def fitted(fitting: Fitting, memory: int) -> FitReport | str:
    """Fit a model to a budget, and revert it.

    Args:
        fitting: Its options.
        memory: Bytes.

    Returns:
        The report; or why there is none, with the least that fits.

    Raises:
        ValueError: If it fails for another reason than the budget.
    """
    fitting.total = memory
    fitting.proposals = replace(fitting.proposals, budget=memory - fitting.static.before_step)
    with quiet():
        try:
            report = fitting.solved()
        except ValueError as error:
            _, is_budget, reason = str(error).partition("cannot be met: ")
            if not is_budget:
                raise
            return f"cannot fit: {reason.partition('. ')[0]}"
        report.plan.revert()
    return report


def counts(rows: Iterable[PlannedBlock]) -> str:
    """Return how many blocks have each option.

    Args:
        rows: What happens to every block.

    Returns:
        As "12 recompute, 2 keep".
    """
    found = Counter(row.option for row in rows)
    return ", ".join(f"{count} {option}" for option, count in found.most_common())
