"""What a training step with each method takes: bytes, each in a process of its own, and seconds, in turns."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.fit_steps import counts, fitted, live_peak, options_of, timed
from benchmarks.frontier.methods import EXACT, METHODS
from benchmarks.frontier.rows import Cost
from benchmarks.frontier.runs import last_line
from benchmarks.frontier.tasks import TRAININGS, Prepared, prepare
from benchmarks.peaks import rss_of
from benchmarks.processes import ProcessError, call
from benchmarks.records import known_rows, put_rows
from benchmarks.timing import quartiles
from rmm_linear.context.auto_bits import STEPS
from rmm_linear.memory import track_saved
from rmm_linear.memory.peak import LiveTensors, Peak
from rmm_linear.planning import BlockPlan, load_plan
from rmm_linear.planning.blocks.plan import CONVERT, KEEP

ROUNDS, TRAINED_ROUNDS = 9, 27  # a step on few rows is short, and one that is disturbed weighs more
_M_MMAP_THRESHOLD = -3  # of glibc: larger tensors are pages of their own, which are given back
# Their hooks store elsewhere what autograd would save.
_OWN_HOOKS = ("checkpoint", "checkpoint-half", "gact")


def plan_path(out: Path, task: str, method: str) -> Path:
    """Return where the plan of a method with a budget is saved.

    Args:
        out: Folder of the results.
        task: Of :data:`benchmarks.frontier.tasks.TRAININGS`.
        method: Of :data:`benchmarks.frontier.methods.METHODS`.

    Returns:
        The path.
    """
    return out / "frontier-plans" / f"{task}-{method}.json"


@dataclass(frozen=True)
class Sized:
    """What is to be measured, and how.

    Attributes:
        tasks: Of :data:`benchmarks.frontier.tasks.TRAININGS`; those on which not all methods are trained are left out.
        methods: Of :data:`benchmarks.frontier.methods.METHODS`; those in studies alone are left out.
        data_dir: Folder in the official GLUE layout.
        model_dir: Folder of the model.
        out: Folder of the csv file and of plans.
        deadline: By ``time.monotonic``, after which no measurement begins; None has no end.
        tiny: Whether to take few rows and rounds.
    """

    tasks: Sequence[str]
    methods: Sequence[str]
    data_dir: str
    model_dir: str
    out: Path
    deadline: float | None = None
    tiny: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to begin."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def prepared(self, task: str) -> Prepared:
        """Read a task.

        Args:
            task: Its name.

        Returns:
            The task, cut into tokens.
        """
        return prepare(task, self.data_dir, self.model_dir, tiny=self.tiny)


def cost(wanted: Sized, about: Mapping[str, Any]) -> Iterator[str]:
    """Measure every method on one batch of every task, and make the plans of those with a budget.

    A task whose methods are all there, with the same settings, is not measured again. If one is missing, all of its
    rows become those of one commit, and its times those of one run. The file is whole after every measurement.

    Args:
        wanted: What to measure.
        about: Where the rows come from.

    Yields:
        A line per method and task.
    """
    path = wanted.out / "frontier-cost.csv"
    for task in wanted.tasks:
        if TRAININGS[task].methods is not None:
            continue
        there = {row.method: row for row in known_rows(path, Cost) if row.task == task}
        asked = {EXACT, *wanted.methods, *there}
        methods = [name for name, how in METHODS.items() if name in asked and how.is_tuned]
        failed = {} if wanted.is_over else _plan(wanted, task, methods)
        known = [name for name in methods if _is_as_wanted(there.get(name), wanted)]
        if len(known) < len(methods) or any(there[name].seconds is None for name in known):
            known = [name for name in known if there[name].commit == about["commit"]]
        for method in (name for name in methods if name not in known):
            if wanted.is_over:
                break
            found = {"status": failed[method]} if method in failed else _measured(wanted, task, method)
            row = Cost(task=task, method=method, **found, **about)
            put_rows(path, [row], lambda one, row=row: (one.task, one.method) == (row.task, row.method))
            kept = row.status if row.kept is None else f"{row.kept / 1e6:.1f} MB kept"
            yield f"{task}, {METHODS[method].title}: {kept}"
        yield _timed(wanted, task, methods, about)


def _timed(wanted: Sized, task: str, methods: Sequence[str], about: Mapping[str, Any]) -> str:
    """Time all methods of a task that can be, if one of them was not; return a line that says so."""
    path = wanted.out / "frontier-cost.csv"
    there = {row.method: row for row in known_rows(path, Cost) if row.task == task}
    able = [method for method in methods if method in there and there[method].status == "ok"]
    missing = [method for method in methods if method not in able]
    without = f"; without {', '.join(missing)}: the same command tries again" if missing else ""
    is_timed = all(there[method].seconds is not None for method in able)
    if wanted.is_over and (missing or not is_timed):
        return f"{task}: not all measured yet, the same command goes on"
    if EXACT not in able:
        return f"{task}: no times, for want of the exact step's; the same command tries again"
    if is_timed:
        return f"{task}: all costs are there{without}"
    try:
        whole, trained = call(_seconds, wanted, task, able, timeout=3600.0)
    except ProcessError as error:
        return f"{task}: no times, {last_line(error)}"
    rows = [replace(there[method], **_times(method, whole, trained), **about) for method in able]
    put_rows(path, rows, lambda one: one.task == task and one.method in able)
    return f"{task}: {len(able)} methods timed{without}"


def _is_as_wanted(row: Cost | None, wanted: Sized) -> bool:
    """Whether a method was measured as it would be now."""
    return row is not None and row.status == "ok" and row.settings == _settings(wanted, row.task, row.method)


def _settings(wanted: Sized, task: str, method: str) -> str:
    how, path = METHODS[method], plan_path(wanted.out, task, method)
    return "" if how.budget and not path.is_file() else how.settings(path)


def _measured(wanted: Sized, task: str, method: str) -> dict[str, Any]:
    """The bytes of a method, or why there are none."""
    settings = {"settings": _settings(wanted, task, method)}
    try:
        found = call(_bytes, wanted, task, method)
        return settings | found | {"rss": call(_rss, wanted, task, method) if sys.platform == "linux" else None}
    except ProcessError as error:
        return settings | {"status": last_line(error)}


def _times(method: str, whole: Mapping[str, list[float]], trained: Mapping[str, list[float]]) -> dict[str, float]:
    """The columns of times, of the seconds of every round."""
    found = dict[str, float]()
    for seconds, prefix in ((whole, ""), (trained, "trained_")):
        lower, median, upper = quartiles(seconds[method])
        by = median / quartiles(seconds[EXACT])[1]
        found |= {f"{prefix}lower": lower, f"{prefix}seconds": median, f"{prefix}upper": upper, f"{prefix}time": by}
    return found


def _plan(wanted: Sized, task: str, methods: Sequence[str]) -> dict[str, str]:
    """Make the plans that are not there; return why there is none, by method."""
    # Runs were trained with those that are: a plan made again is another one, since it follows from measured times.
    asked = {name: share for name in methods if (share := METHODS[name].budget)}
    budgets = {name: share for name, share in asked.items() if not plan_path(wanted.out, task, name).is_file()}
    try:
        return call(_plans, wanted, task, budgets, timeout=3600.0) if budgets else {}
    except ProcessError as error:
        return dict.fromkeys(budgets, last_line(error))


def _plans(wanted: Sized, task: str, budgets: Mapping[str, float]) -> dict[str, str]:
    ready = wanted.prepared(task)
    model = ready.model(0)
    fitting = options_of(model, ready.batch(model))
    failed = dict[str, str]()
    least = fitting.static.before_step + fitting.proposals.smallest().predicted
    for name, share in budgets.items():
        path = plan_path(wanted.out, task, name)
        report = fitted(fitting, least + int(share * (fitting.exact_peak - least)))
        if isinstance(report, str):
            failed[name] = report
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        report.plan.save(path)
    return failed


def _ready(
    ready: Prepared, method: str, out: Path, count: int | None = None
) -> tuple[nn.Module, dict[str, Any], BlockPlan | None]:
    """A model that has made a few steps, so that buffers are there and widths are chosen; its batch, and its plan."""
    how = METHODS[method]
    model = ready.model(0)
    batch = ready.batch(model, indexed=how.is_indexed, count=count)
    path = plan_path(out, ready.name, method) if how.budget else None
    prepared = how.prepare(model, path)
    plan: Any = None if path is None else load_plan(path)
    for _ in range(STEPS + 1):
        prepared(**batch).loss.backward()
    return prepared, batch, plan


def _bytes(wanted: Sized, task: str, method: str) -> dict[str, Any]:
    ready = wanted.prepared(task)
    model, batch, plan = _ready(ready, method, wanted.out)
    step = _step(model, batch)
    small = ready.batch(ready.model(0), count=ready.training.batch)
    found: dict[str, Any] = {"batch": _shape(batch), "trained_batch": _shape(small)}
    blocks = [] if plan is None else plan.blocks
    found["plan"] = counts(blocks)
    if method not in _OWN_HOOKS and {block.choice for block in blocks} <= {KEEP, CONVERT}:
        with track_saved(model) as ledger:
            loss = model(**batch).loss
        found["saved"] = ledger.total
        loss.backward()
    model.zero_grad(set_to_none=True)
    with LiveTensors(Peak()) as live:
        loss = model(**batch).loss
        found["kept"] = live.now
        loss.backward()
    found["peak"] = live_peak(model, step)
    return found


def _rss(wanted: Sized, task: str, method: str) -> int:
    """In a process of its own whose allocator hands back what is freed: what it holds is what tensors need."""
    give_back()
    model, batch, _ = _ready(wanted.prepared(task), method, wanted.out)
    model.zero_grad(set_to_none=True)
    return rss_of(_step(model, batch))


def give_back() -> None:
    """Make glibc's allocator hand back what is freed, in this process from now on."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)


def _seconds(wanted: Sized, task: str, methods: Sequence[str]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Of the batch whose bytes are counted, and of one as large as those that are trained on."""
    ready = wanted.prepared(task)
    runs, trained = dict[str, Any](), dict[str, Any]()
    for method in methods:
        model, batch, _ = _ready(ready, method, wanted.out)
        runs[method] = _step(model, batch)
        small = ready.batch(ready.model(0), indexed=METHODS[method].is_indexed, count=ready.training.batch)
        trained[method] = _step(model, small)
    rounds, more = (1, 1) if wanted.tiny else (ROUNDS, TRAINED_ROUNDS)
    return timed(nn.Module(), runs, rounds), timed(nn.Module(), trained, more)


def _shape(batch: Mapping[str, Any]) -> str:
    return " × ".join(map(str, batch["input_ids"].shape))


def _step(model: nn.Module, batch: dict[str, Any]) -> Any:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()

    return step
