"""Times in interleaved rounds: machines drift, so providers are interleaved, and only ratios within one run count."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.utils.benchmark import Timer

_SHORTEST = 0.01  # seconds of one CPU measurement: below, the clock and the caller's overhead would show
_WARMUP_MS, _REPEAT_MS = 10, 60


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def interleaved(runs: Mapping[str, Callable[[], object]], device: str, rounds: int) -> dict[str, list[float]]:
    """Time functions interleaved, every second round in reverse order."""
    measure = _on_cpu if device == "cpu" else _on_cuda
    times: dict[str, list[float]] = {title: [] for title in runs}
    for number in range(rounds):
        for title in list(runs)[:: -1 if number % 2 else 1]:
            times[title] += measure(runs[title])
    return times


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, median, upper


def _on_cpu(run: Callable[[], object]) -> list[float]:
    """One measurement, of as many calls as take long enough; a first one, which decides how many, is left out."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return [timer.blocked_autorange(min_run_time=_SHORTEST).median]


def _on_cuda(run: Callable[[], object]) -> list[float]:
    from triton.testing import do_bench

    milliseconds = do_bench(run, warmup=_WARMUP_MS, rep=_REPEAT_MS, return_mode="all")
    return [value / 1000 for value in milliseconds]  # pyright: ignore[reportOptionalIterable, reportGeneralTypeIssues]
