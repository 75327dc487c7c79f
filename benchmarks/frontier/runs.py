"""What is asked for, and runs in processes of their own: a few at a time, none after its time; they are resumed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.processes import call, last_line
from benchmarks.records import Record, put_rows
from benchmarks.timing import threads

_TIMEOUT = 6 * 3600.0
Run = TypeVar("Run", bound=tuple)


@dataclass(frozen=True)
class Asked:
    """What is to be run, and how. Methods whose gradients are the exact ones, or in studies alone, are not trained."""

    out: Path  # folder of the csv files and of plans
    tasks: Sequence[str] = ()
    studies: Sequence[str] = ()
    methods: Sequence[str] = ()
    seeds: Sequence[int] = ()  # of every method
    data_dir: str = ""  # in the official GLUE layout
    model_dir: str = ""
    wordnet: str = ""
    base_dir: str = ""  # of the model that adapters have
    jobs: int = 1  # runs at a time
    deadline: float | None = None  # by ``time.monotonic``, after which nothing begins; None has no end
    tiny: bool = False  # few rows, steps and rounds

    @property
    def is_over(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def plan(self, task: str, method: str) -> Path:
        return self.out / "frontier-plans" / f"{task}-{method}.json"


def go_on(
    asked: Asked,
    count: int,
    done: int,
    pending: Sequence[Run],
    arguments: Callable[[Run], tuple[Any, ...]],
    keep: Callable[[Run, Any], str],
) -> Iterator[str]:
    """Run what is pending; yield a line per run, with what is said of it when it is kept, and what is left of all."""
    failed = 0
    for run, found in in_turn(pending, arguments, asked.jobs, asked.deadline):
        title = ", ".join(map(str, run))
        if isinstance(found, BaseException):
            failed += 1
            yield f"{title} failed: {last_line(found)}"
        else:
            done += 1
            yield f"[{done}/{count}] {title}: {keep(run, found)}"
    left = f"{count - done} runs are left, {failed} of which failed: the same command goes on"
    yield left if done < count else "all runs are there"


def put_run(path: Path, rows: Sequence[Record], about: dict[str, Any], jobs: int, key: Callable[[Any], Any]) -> None:
    """Write the rows of a run that has just ended, in place of those with the same key."""
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    here = about | {"threads": max(about["threads"] // jobs, 1), "date": date}
    put_rows(path, [replace(row, **here) for row in rows], lambda row: key(row) == key(rows[0]))


def in_turn(
    pending: Sequence[Run], arguments: Callable[[Run], tuple[Any, ...]], jobs: int, deadline: float | None
) -> Iterator[tuple[Run, Any]]:
    """Run a function of a module with its arguments for each; yield runs with their results, or with their errors."""
    waiting, running = list(pending), dict[Future[Any], Run]()
    with threads(max(torch.get_num_threads() // jobs, 1)), ThreadPoolExecutor(jobs) as pool:
        while waiting or running:
            is_time_left = deadline is None or time.monotonic() < deadline
            while waiting and is_time_left and len(running) < jobs:
                run = waiting.pop(0)
                running[pool.submit(lambda one: call(*one, timeout=_TIMEOUT), arguments(run))] = run
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                error = future.exception()
                yield running.pop(future), future.result() if error is None else error
