"""Runs in processes of their own, a few at a time, none after its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, TypeVar

import torch

from benchmarks.processes import call

_TIMEOUT = 6 * 3600.0
Run = TypeVar("Run")


def in_turn(
    pending: Sequence[Run], arguments: Callable[[Run], tuple[Any, ...]], jobs: int, deadline: float | None
) -> Iterator[tuple[Run, Any]]:
    """Run what is pending.

    Args:
        pending: The runs.
        arguments: Of a run: a function of a module, and its arguments.
        jobs: Runs at a time; they share the threads.
        deadline: By ``time.monotonic``, after which none begins; None has no end.

    Yields:
        Every run with its result as soon as it is there, or with the error that ended it.
    """
    waiting = list(pending)
    running: dict[Future[Any], Run] = {}
    with _shared_threads(jobs), ThreadPoolExecutor(jobs) as pool:
        while waiting or running:
            is_time_left = deadline is None or time.monotonic() < deadline
            while waiting and is_time_left and len(running) < jobs:
                run = waiting.pop(0)
                running[pool.submit(_called, arguments(run))] = run
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                error = future.exception()
                yield running.pop(future), future.result() if error is None else error


def about_run(about: dict[str, Any], jobs: int) -> dict[str, Any]:
    """Return where a run comes from that has just ended.

    Args:
        about: Where those of the command come from.
        jobs: Runs at a time.

    Returns:
        The same with the threads of a run, and the time.
    """
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return about | {"threads": max(about["threads"] // jobs, 1), "date": date}


def what_is_left(done: int, every: int, failed: int) -> str:
    """Say whether all runs are there.

    Args:
        done: Runs that are.
        every: Runs that were asked for.
        failed: Runs that ended in an error.

    Returns:
        A line.
    """
    if done == every:
        return "all runs are there"
    return f"{every - done} runs are left, {failed} of which failed: the same command goes on"


def last_line(error: BaseException) -> str:
    """Return what an error says in one line.

    Args:
        error: The error; of a process of its own, the traceback is in its text.

    Returns:
        The last line of its text.
    """
    return next(iter(str(error).strip().splitlines()[::-1]), type(error).__name__)


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
