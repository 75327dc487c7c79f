"""Runs in processes of their own, a few at a time, none after its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from benchmarks.processes import call

_TIMEOUT = 6 * 3600.0
Run = TypeVar("Run")


def in_turn(
    pending: Sequence[Run], arguments: Callable[[Run], tuple[Any, ...]], jobs: int, minutes: float | None
) -> Iterator[tuple[Run, Any]]:
    """Run what is pending.

    Args:
        pending: The runs.
        arguments: Of a run: a function of a module, and its arguments.
        jobs: Runs at a time; they share the threads.
        minutes: After which none begins; None has no end.

    Yields:
        Every run with its result, as soon as it is there.
    """
    begin, waiting = time.monotonic(), list(pending)
    running: dict[Future[Any], Run] = {}
    with _shared_threads(jobs), ThreadPoolExecutor(jobs) as pool:
        while waiting or running:
            is_time_left = minutes is None or time.monotonic() - begin < 60 * minutes
            while waiting and is_time_left and len(running) < jobs:
                run = waiting.pop(0)
                running[pool.submit(_called, arguments(run))] = run
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


def _called(arguments: tuple[Any, ...]) -> Any:
    return call(*arguments, timeout=_TIMEOUT)


@contextmanager
def _shared_threads(jobs: int) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads // jobs, 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
