"""What a training step with each method takes: bytes, each in a process of its own, and seconds, in turns."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.fit_steps import counts, fitted, live_peak, medians, options_of
from benchmarks.frontier.methods import EXACT, METHODS
from benchmarks.frontier.rows import Cost
from benchmarks.frontier.runs import last_line
from benchmarks.frontier.tasks import Prepared, prepare
from benchmarks.peaks import rss_of
from benchmarks.processes import ProcessError, call
from benchmarks.records import read_rows, write_rows
from rmm_linear.context.auto_bits import STEPS
from rmm_linear.memory import track_saved
from rmm_linear.memory.peak import LiveTensors, Peak
from rmm_linear.planning import BlockPlan, load_plan
from rmm_linear.planning.block_plan import CONVERT, KEEP

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


def cost(
    tasks: Sequence[str],
    methods: Sequence[str],
    out: Path,
    data_dir: str,
    model_dir: str,
    about: Mapping[str, Any],
    *,
    tiny: bool = False,
) -> Iterator[str]:
    """Measure every method on one batch of every task, and make the plans of those with a budget.

    A task whose methods are all there is not measured again. Otherwise they all are: times are those of one run.

    Args:
        tasks: Of :data:`benchmarks.frontier.tasks.TRAININGS`.
        methods: Of :data:`benchmarks.frontier.methods.METHODS`, "exact" among them.
        out: Folder of the csv file and of plans.
        data_dir: Folder in the official GLUE layout.
        model_dir: Folder of the model.
        about: Where the rows come from.
        tiny: Whether to take few rows and rounds.

    Yields:
        A line per method and task.
    """
    path = out / "frontier-cost.csv"
    methods = [EXACT, *(method for method in methods if method != EXACT)]
    for task in tasks:
        before = read_rows(path, Cost) if path.is_file() else []
        if {*methods} <= {row.method for row in before if row.task == task}:
            yield f"{task}: all costs are there"
            continue
        failed = _plan(task, methods, out, data_dir, model_dir, tiny)
        rows = dict[str, Cost]()
        for method in methods:
            row = Cost(task=task, method=method, status=failed.get(method, "ok"), **about)
            if method not in failed:
                row = dataclasses.replace(row, **_measured(task, method, out, data_dir, model_dir, tiny))
            rows[method] = row
            kept = row.status if row.kept is None else f"{row.kept / 1e6:.1f} MB kept"
            yield f"{task}, {METHODS[method].title}: {kept}"
        able = [method for method, row in rows.items() if row.status == "ok"]
        whole, trained = call(_seconds, task, able, out, data_dir, model_dir, tiny, timeout=3600.0)
        timed = [
            dataclasses.replace(
                row,
                seconds=whole.get(row.method),
                time=_by(row.method, whole),
                trained_seconds=trained.get(row.method),
                trained_time=_by(row.method, trained),
            )
            for row in rows.values()
        ]
        write_rows(path, [row for row in before if row.task != task or row.method not in rows] + timed)
        yield f"{task}: {len(able)} methods timed"


def _measured(task: str, method: str, *where: Any) -> dict[str, Any]:
    """The bytes of a method, or why there are none."""
    try:
        found = call(_bytes, task, method, *where)
        return found | {"rss": call(_rss, task, method, *where) if sys.platform == "linux" else None}
    except ProcessError as error:
        return {"status": last_line(error)}


def _by(method: str, seconds: Mapping[str, float]) -> float | None:
    return seconds[method] / seconds[EXACT] if method in seconds else None


def _plan(task: str, methods: Sequence[str], out: Path, data_dir: str, model_dir: str, tiny: bool) -> dict[str, str]:
    """Make the plans that are not there; return why there is none, by method."""
    # Runs were trained with those that are: a plan made again is another one, since it follows from measured times.
    asked = {name: share for name in methods if (share := METHODS[name].budget)}
    budgets = {name: share for name, share in asked.items() if not plan_path(out, task, name).is_file()}
    return call(_plans, task, budgets, out, data_dir, model_dir, tiny, timeout=3600.0) if budgets else {}


def _plans(
    task: str, budgets: Mapping[str, float], out: Path, data_dir: str, model_dir: str, tiny: bool
) -> dict[str, str]:
    ready = prepare(task, data_dir, model_dir, tiny=tiny)
    model = ready.model(0)
    fitting = options_of(model, ready.batch(model))
    failed = dict[str, str]()
    least = fitting.static.before_step + fitting.proposals.smallest().predicted
    for name, share in budgets.items():
        path = plan_path(out, task, name)
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
    prepared = how.planned(path)(model)
    plan: Any = None if path is None else load_plan(path)
    for _ in range(STEPS + 1):
        prepared(**batch).loss.backward()
    return prepared, batch, plan


def _bytes(task: str, method: str, out: Path, data_dir: str, model_dir: str, tiny: bool) -> dict[str, Any]:
    ready = prepare(task, data_dir, model_dir, tiny=tiny)
    model, batch, plan = _ready(ready, method, out)
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


def _rss(task: str, method: str, out: Path, data_dir: str, model_dir: str, tiny: bool) -> int:
    """In a process of its own whose allocator hands back what is freed: what it holds is what tensors need."""
    give_back()
    ready = prepare(task, data_dir, model_dir, tiny=tiny)
    model, batch, _ = _ready(ready, method, out)
    model.zero_grad(set_to_none=True)
    return rss_of(_step(model, batch))


def give_back() -> None:
    """Make glibc's allocator hand back what is freed, in this process from now on."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)


def _seconds(
    task: str, methods: Sequence[str], out: Path, data_dir: str, model_dir: str, tiny: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Of the batch whose bytes are counted, and of one as large as those that are trained on."""
    ready = prepare(task, data_dir, model_dir, tiny=tiny)
    runs, trained = dict[str, Any](), dict[str, Any]()
    for method in methods:
        model, batch, _ = _ready(ready, method, out)
        runs[method] = _step(model, batch)
        small = ready.batch(ready.model(0), indexed=METHODS[method].is_indexed, count=ready.training.batch)
        trained[method] = _step(model, small)
    rounds, more = (1, 1) if tiny else (ROUNDS, TRAINED_ROUNDS)
    return medians(nn.Module(), runs, rounds), medians(nn.Module(), trained, more)


def _shape(batch: Mapping[str, Any]) -> str:
    return " × ".join(map(str, batch["input_ids"].shape))


def _step(model: nn.Module, batch: dict[str, Any]) -> Any:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()

    return step
