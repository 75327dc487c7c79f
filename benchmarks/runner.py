"""Run a suite: gate, times of all providers in turns, memory in processes of their own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks import gate
from benchmarks.case import Case, Setup
from benchmarks.processes import ProcessError, call
from benchmarks.records import Row
from benchmarks.suites import SUITES, setup
from benchmarks.timing import interleaved, quartiles
from rmm_linear.context.auto_bits import STEPS
from rmm_linear.memory import peak, track_saved

logger = logging.getLogger("benchmarks")


def has_memory(case: Case) -> bool:
    """Say whether memory is measured: of models, and of layers at the ratio that the README shows.

    Args:
        case: The case.

    Returns:
        Whether it is.
    """
    return case.suite == "model" or (case.suite == "linear" and case.ratio == 0.1)


def run_cases(
    cases: Sequence[Case],
    *,
    seed: int = 0,
    make: Callable[[Case, str], Setup] = setup,
    memory: Callable[[Case], bool] = has_memory,
) -> Iterator[list[Row]]:
    """Measure all providers on every case.

    Args:
        cases: Cases of one suite.
        seed: Seed of the seeds that the timed runs draw.
        make: What makes a provider ready.
        memory: Whether to measure kept and peak bytes of a case.

    Yields:
        The rows of one case, the reference first. A provider that fails, at the gate or with an error, has its reason
        for a status and no times; it stops no other.
    """
    for case in cases:
        suite = SUITES[case.suite]
        ready: dict[str, Setup] = {}
        status: dict[str, str] = {}
        titles = suite.providers(case)
        torch.manual_seed(seed)
        for title in titles:
            try:
                candidate = make(case, title)
                status[title] = gate.failure(candidate, case.torch_dtype)
                if not status[title]:
                    candidate.run()
                    ready[title] = candidate
            except Exception as error:
                logger.exception("%s: %s, %s", case.name, title, case.dtype)
                status[title] = f"{type(error).__name__}: {error}".splitlines()[0]
        torch.manual_seed(seed)
        try:
            times = interleaved({title: ready[title].run for title in ready}, case.device, case.rounds)
        except Exception as error:
            logger.exception("%s: timing, %s", case.name, case.dtype)
            times, status = {}, dict.fromkeys(titles, f"{type(error).__name__}: {error}".splitlines()[0])
        rows = [_row(case, title, status[title], times, ready, seed) for title in titles]
        moved = {title: ready[title].moved for title in ready}
        del ready  # the memory that other processes need
        rows = _with_memory(case, rows) if memory(case) else rows
        yield _with_ratios(rows, suite.REFERENCE, moved)


def memories_of(case: Case, providers: Sequence[str]) -> dict[str, tuple[int, int] | str]:
    """Measure what providers keep; meant for a process of its own.

    Args:
        case: The case.
        providers: The providers.

    Returns:
        Title to the result of :func:`memory_of`, or to the error.
    """
    found: dict[str, tuple[int, int] | str] = {}
    for title in providers:
        try:
            found[title] = memory_of(case, title)
        except Exception as error:
            found[title] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def memory_of(case: Case, provider: str) -> tuple[int, int]:
    """Measure what one provider keeps.

    Args:
        case: The case.
        provider: The provider.

    Returns:
        Bytes alive between forward and backward pass, parameters excluded; peak of one step.

    Raises:
        ValueError: If the provider keeps nothing, as kernels do.
    """
    candidate = setup(case, provider)
    if candidate.module is None or candidate.forward is None:
        raise ValueError(f"memory_of measures layers and models, got a case of the suite {case.suite}.")
    for _ in range(STEPS + 1 if provider.startswith("default") else 1):
        candidate.run()  # bits="auto" has chosen
    with track_saved(candidate.module) as ledger:
        alive = candidate.forward()
    kept = ledger.total
    del alive
    with peak(case.device) as measured:
        candidate.run()
    return kept, measured.bytes


def _row(case: Case, title: str, status: str, times: dict[str, list[float]], ready: dict[str, Setup], seed: int) -> Row:
    row = Row(case.suite, case.name, title, case.dtype, case.ratio, status or "ok", seed=seed)
    if title not in times:
        return row
    lower, median, upper = quartiles(times[title])
    return dataclasses.replace(
        row,
        median=median,
        lower=lower,
        upper=upper,
        samples=len(times[title]),
        moved_bytes=ready[title].moved or None,
    )


def _with_ratios(rows: list[Row], reference: str, moved: dict[str, int]) -> list[Row]:
    """Ratios of medians, all from this run."""
    (base,) = [row for row in rows if row.provider == reference]
    result = []
    for row in rows:
        relative = share = None
        if row.median is not None and base.median is not None:
            if moved.get(row.provider) and moved.get(reference):
                share = (moved[row.provider] / row.median) / (moved[reference] / base.median)
            else:
                relative = row.median / base.median
        result.append(dataclasses.replace(row, relative=relative, copy_share=share))
    return result


def _with_memory(case: Case, rows: list[Row]) -> list[Row]:
    """Add kept and peak bytes to the rows that have times."""
    titles = [row.provider for row in rows if row.status == "ok"]
    try:
        found = call(memories_of, case, titles)
    except ProcessError as error:
        found = dict.fromkeys(titles, str(error).splitlines()[-1])
    return [_with_bytes(row, found[row.provider]) if row.provider in found else row for row in rows]


def _with_bytes(row: Row, found: tuple[int, int] | str) -> Row:
    if isinstance(found, str):
        logger.error("%s: memory of %s: %s", row.case, row.provider, found)
        return dataclasses.replace(row, status=f"memory: {found}")
    return dataclasses.replace(row, kept_bytes=found[0], peak_bytes=found[1])
