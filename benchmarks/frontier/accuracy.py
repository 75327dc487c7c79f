"""Runs of all methods on all tasks that go on where they stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.frontier.cost import plan_path
from benchmarks.frontier.methods import EXACT, METHODS
from benchmarks.frontier.rows import Epoch
from benchmarks.frontier.runs import about_run, in_turn, last_line, what_is_left
from benchmarks.frontier.tasks import TRAININGS
from benchmarks.frontier.training import DROPOUT, train
from benchmarks.records import known_rows, put_rows

Run = tuple[str, str, int]


@dataclass(frozen=True)
class Wanted:
    """What is to be run, and how.

    Attributes:
        tasks: Of :data:`benchmarks.frontier.tasks.TRAININGS`.
        methods: Of :data:`benchmarks.frontier.methods.METHODS`; those whose gradients are exact's, or which are in
            studies alone, are not run.
        seeds: Of every method.
        data_dir: Folder in the official GLUE layout.
        model_dir: Folder of the model.
        out: Folder of the csv file and of plans.
        jobs: Runs at a time.
        deadline: By ``time.monotonic``, after which no run begins; None has no end.
        tiny: Whether to take few rows.
    """

    tasks: Sequence[str]
    methods: Sequence[str]
    seeds: Sequence[int]
    data_dir: str
    model_dir: str
    out: Path
    jobs: int = 1
    deadline: float | None = None
    tiny: bool = False


def accuracy(wanted: Wanted, about: dict[str, Any]) -> Iterator[str]:
    """Run what is not there yet, or was run with other settings; the file is whole after every run.

    Args:
        wanted: What to run. Seeds are the outer loop, so that all methods are there once before one is there twice.
        about: Where the rows come from.

    Yields:
        A line per run, and what is left.
    """
    path = wanted.out / "frontier-accuracy.csv"
    trained = [
        name for name in wanted.methods if name == EXACT or (not METHODS[name].is_exact and METHODS[name].is_tuned)
    ]
    every: list[Run] = [
        (task, method, seed)
        for seed in wanted.seeds
        for task in wanted.tasks
        for method in trained
        if method in (TRAININGS[task].methods or trained) and seed in (TRAININGS[task].seeds or wanted.seeds)
    ]
    without = [run for run in every if METHODS[run[1]].budget and not plan_path(wanted.out, run[0], run[1]).is_file()]
    able = [run for run in every if run not in without]
    there = {_key(row): row for row in known_rows(path, Epoch)}
    pending = [run for run in able if run not in there or not _is_as_wanted(there[run], wanted)]
    done = len(able) - len(pending)

    def arguments(run: Run) -> tuple[Any, ...]:
        task, method, seed = run
        plan = plan_path(wanted.out, task, method) if METHODS[method].budget else None
        return train, task, method, seed, wanted.data_dir, wanted.model_dir, plan, wanted.tiny

    failed = 0
    for run, found in in_turn(pending, arguments, wanted.jobs, wanted.deadline):
        title = ", ".join(map(str, run))
        if isinstance(found, BaseException):
            failed += 1
            yield f"{title} failed: {last_line(found)}"
            continue
        rows = [dataclasses.replace(row, **about_run(about, wanted.jobs)) for row in found]
        put_rows(path, rows, lambda row, run=run: _key(row) == run)
        done += 1
        yield f"[{done}/{len(able)}] {title}: {found[-1].score:.4f} ({found[-1].seconds:.0f} s)"
    for task, method, seed in without:
        yield f"{task}, {method}, {seed}: no plan, see part cost"
    if done < len(able) or not without:
        yield what_is_left(done, len(able), failed)


def _key(row: Epoch) -> Run:
    return row.task, row.method, row.seed


def _is_as_wanted(row: Epoch, wanted: Wanted) -> bool:
    """Whether a run that is there was trained as it would be now."""
    how, training = METHODS[row.method], TRAININGS[row.task]
    plan = plan_path(wanted.out, row.task, row.method) if how.budget else None
    is_all = wanted.tiny or training.rows in (None, row.rows)
    now = (training.epochs, training.batch, how.learning_rate / training.slower, how.settings(plan), DROPOUT)
    return is_all and now == (row.epochs, row.batch, row.learning_rate, row.settings, row.dropout)
