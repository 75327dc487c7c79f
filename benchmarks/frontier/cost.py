"""What a training step with each method takes: bytes, each in a process of its own, and seconds, in turns."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from benchmarks.frontier.methods import EXACT, METHODS
from benchmarks.frontier.offloaded import host_bytes
from benchmarks.frontier.rows import Cost
from benchmarks.frontier.runs import Asked
from benchmarks.frontier.tasks import TRAININGS, Prepared, prepare
from benchmarks.library import CONVERT, KEEP, LiveTensors, Peak, allocator_peak
from benchmarks.noise.blocks import rss_of
from benchmarks.planning.fit_steps import budget_of, counts, fitted, live_peak, options_of, timed
from benchmarks.processes import ProcessError, call, last_line
from benchmarks.records import known_rows, put_rows
from benchmarks.timing import quartiles
from rmm_linear.memory import track_saved
from rmm_linear.planning import BlockPlan, load_plan

ROUNDS, TRAINED_ROUNDS = 9, 27  # a step on few rows is short, and one that is disturbed weighs more
_M_MMAP_THRESHOLD = -3  # of glibc: larger tensors are pages of their own, which are given back
# Their hooks store elsewhere what autograd would save.
OWN_HOOKS = ("checkpoint", "checkpoint-offload", "gact", "loract")


def cost(asked: Asked, about: Mapping[str, Any]) -> Iterator[str]:
    """Measure every method on one batch of every task, and make the plans of those with a budget.

    A task whose methods are all there, with the same settings, is not measured again. If one is missing, all of its
    rows become those of one commit, and its times those of one run. The file is whole after every measurement.
    """
    path = asked.out / "frontier-cost.csv"
    for task in asked.tasks:
        if not has_costs(task):
            continue
        there = {row.method: row for row in known_rows(path, Cost) if row.task == task}
        some = {EXACT, *asked.methods, *there}
        able = TRAININGS[task].methods or METHODS
        methods = [name for name, how in METHODS.items() if name in some and name in able and how.is_tuned]
        failed = {} if asked.is_over else _plan(asked, task, methods)
        known = [name for name in methods if _is_as_wanted(there.get(name), asked)]
        if len(known) < len(methods) or any(there[name].seconds is None for name in known):
            known = [name for name in known if there[name].commit == about["commit"]]
        for method in (name for name in methods if name not in known):
            if asked.is_over:
                break
            found = {"status": failed[method]} if method in failed else _measured(asked, task, method)
            row = Cost(task=task, method=method, **found, **about)
            put_rows(path, [row], lambda one, row=row: (one.task, one.method) == (row.task, row.method))
            kept = row.status if row.kept is None else f"{row.kept / 1e6:.1f} MB kept"
            yield f"{task}, {METHODS[method].title}: {kept}"
        yield _timed(asked, task, methods, about)


def has_costs(task: str) -> bool:
    """Say whether a task is measured: not where another one trains the same model on the same rows."""
    training = TRAININGS[task]
    alike = (name for name, one in TRAININGS.items() if (one.task, one.dtype) == (training.task, training.dtype))
    return task == next(alike)


def _timed(asked: Asked, task: str, methods: Sequence[str], about: Mapping[str, Any]) -> str:
    """Time all methods of a task that can be, if one of them was not; return a line that says so."""
    path = asked.out / "frontier-cost.csv"
    there = {row.method: row for row in known_rows(path, Cost) if row.task == task}
    able = [method for method in methods if method in there and there[method].status == "ok"]
    missing = [method for method in methods if method not in able]
    without = f"; without {', '.join(missing)}: the same command tries again" if missing else ""
    is_timed = all(there[method].seconds is not None for method in able)
    if asked.is_over and (missing or not is_timed):
        return f"{task}: not all measured yet, the same command goes on"
    if EXACT not in able:
        return f"{task}: no times, for want of the exact step's; the same command tries again"
    if is_timed:
        return f"{task}: all costs are there{without}"
    try:
        whole, trained = call(_seconds, asked, task, able, timeout=3600.0)
    except ProcessError as error:
        return f"{task}: no times, {last_line(error)}"
    rows = [replace(there[method], **_times(method, whole, trained), **about) for method in able]
    put_rows(path, rows, lambda one: one.task == task and one.method in able)
    return f"{task}: {len(able)} methods timed{without}"


def _is_as_wanted(row: Cost | None, asked: Asked) -> bool:
    return row is not None and row.status == "ok" and row.settings == _settings(asked, row.task, row.method)


def _settings(asked: Asked, task: str, method: str) -> str:
    how, path = METHODS[method], asked.plan(task, method)
    return "" if how.budget and not path.is_file() else how.settings(path)


def _measured(asked: Asked, task: str, method: str) -> dict[str, Any]:
    settings = {"settings": _settings(asked, task, method)}
    try:
        found = call(_bytes, asked, task, method)
        return settings | found | {"rss": call(_rss, asked, task, method) if sys.platform == "linux" else None}
    except ProcessError as error:
        return settings | {"status": last_line(error)}


def _times(method: str, whole: Mapping[str, list[float]], trained: Mapping[str, list[float]]) -> dict[str, float]:
    found = dict[str, float]()
    for seconds, prefix in ((whole, ""), (trained, "trained_")):
        lower, median, upper = quartiles(seconds[method])
        by = median / quartiles(seconds[EXACT])[1]
        found |= {f"{prefix}lower": lower, f"{prefix}seconds": median, f"{prefix}upper": upper, f"{prefix}time": by}
    return found


def _plan(asked: Asked, task: str, methods: Sequence[str]) -> dict[str, str]:
    """Make the plans that are not there; return why there is none, by method."""
    # Runs were trained with those that are: a plan made again is another one, since it follows from measured times.
    shares = {name: share for name in methods if (share := METHODS[name].budget)}
    budgets = {name: share for name, share in shares.items() if not asked.plan(task, name).is_file()}
    try:
        return call(_plans, asked, task, budgets, timeout=3600.0) if budgets else {}
    except ProcessError as error:
        return dict.fromkeys(budgets, last_line(error))


def _plans(asked: Asked, task: str, budgets: Mapping[str, float]) -> dict[str, str]:
    ready = _prepared(asked, task)
    model = ready.model(0)
    fitting = options_of(model, ready.batch(model))
    failed = dict[str, str]()
    for name, share in budgets.items():
        path = asked.plan(task, name)
        report = fitted(fitting, budget_of(fitting, share))
        if isinstance(report, str):
            failed[name] = report
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        report.plan.save(path)
    return failed


def _prepared(asked: Asked, task: str) -> Prepared:
    return prepare(task, asked.data_dir, asked.model_dir, tiny=asked.tiny)


def _ready(ready: Prepared, method: str, asked: Asked) -> tuple[nn.Module, dict[str, Any], BlockPlan | None]:
    """A model that has made a few steps, so that buffers are there; its batch, and its plan."""
    how = METHODS[method]
    model = ready.model(0)
    batch = ready.batch(model, indexed=how.is_indexed)
    path = asked.plan(ready.name, method) if how.budget else None
    prepared = how.prepare(model, path)
    plan: Any = None if path is None else load_plan(path)
    for _ in range(2):
        prepared(**batch).loss.backward()
    return prepared, batch, plan


def _bytes(asked: Asked, task: str, method: str) -> dict[str, Any]:
    ready = _prepared(asked, task)
    model, batch, plan = _ready(ready, method, asked)
    step = _step(model, batch)
    small = ready.batch(ready.model(0), count=ready.training.batch)
    found: dict[str, Any] = {"batch": _shape(batch), "trained_batch": _shape(small)}
    blocks = [] if plan is None else plan.blocks
    found["plan"] = counts(blocks)
    if method not in OWN_HOOKS and {block.choice for block in blocks} <= {KEEP, CONVERT}:
        with track_saved(model) as ledger:
            loss = model(**batch).loss
        found["saved"] = ledger.total
        loss.backward()
    model.zero_grad(set_to_none=True)
    if METHODS[method].is_compiled:  # with operators seen one by one, it would not run as compiled
        return found | {"kept": found["saved"], "peak": allocator_peak(step)}
    with LiveTensors(Peak()) as live:
        loss = model(**batch).loss
        kept, found["host"] = live.now, host_bytes(model)
        loss.backward()
    held = _buffers(model) - _buffers(ready.model(0))
    return found | {"kept": kept + held, "peak": live_peak(model, step) + held}


def _buffers(model: nn.Module) -> int:
    return sum(buffer.nbytes for buffer in model.buffers())


def _rss(asked: Asked, task: str, method: str) -> int:
    """In a process of its own whose allocator hands back what is freed: what it holds is what tensors need."""
    give_back()
    model, batch, _ = _ready(_prepared(asked, task), method, asked)
    model.zero_grad(set_to_none=True)
    return rss_of(_step(model, batch))


def give_back() -> None:
    """Make glibc's allocator hand back what is freed, in this process from now on."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)


def _seconds(asked: Asked, task: str, methods: Sequence[str]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Of the batch whose bytes are counted, and of one as large as those that are trained on."""
    ready = _prepared(asked, task)
    runs, trained = dict[str, Any](), dict[str, Any]()
    for method in methods:
        model, batch, _ = _ready(ready, method, asked)
        runs[method] = _step(model, batch)
        small = ready.batch(ready.model(0), indexed=METHODS[method].is_indexed, count=ready.training.batch)
        trained[method] = _step(model, small)
    rounds, more = (1, 1) if asked.tiny else (ROUNDS, TRAINED_ROUNDS)
    return timed(nn.Module(), runs, rounds), timed(nn.Module(), trained, more)


def _shape(batch: Mapping[str, Any]) -> str:
    return " × ".join(map(str, batch["input_ids"].shape))


def _step(model: nn.Module, batch: dict[str, Any]) -> Any:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()

    return step
