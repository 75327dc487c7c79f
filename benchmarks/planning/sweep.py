"""Sweeps: forward steps of all schedules, which are counted, and the time that a real folder makes them wait."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import BLUE, RED, figure_of, headed, x_ticks
from benchmarks.library import provenance, schedules
from benchmarks.records import Origin
from benchmarks.timing import threads
from rmm_linear.planning import SweepReport, sweep

SLOTS, INTERVAL = 6, 50
BACKWARD = 2  # time of a step's backward pass, in forward steps
_DISK = 10  # slots of H-Revolve's second level


@dataclass(frozen=True, kw_only=True)
class Steps(Origin):
    """What one schedule does with a chain, counted."""

    table: str  # which table the row belongs to
    schedule: str  # title of the schedule
    steps: int  # steps of the chain
    slots: int  # states in fast memory
    interval: int | None = None  # steps between stored states; empty where there is no such number
    forward_steps: int = 0  # forward steps in all
    per_step: float = 0.0  # the same per step of the chain
    stored: int = 0  # states that go to the store; a sweep leaves out the first of them, the initial one
    of_revolve: float = 0.0  # time by that of Revolve with as many slots, a backward step being two forward steps
    checkpoint_schedules: str = ""  # version of the package
    seed: int = 0  # none is used; nothing is random


def counts(about: dict[str, Any], tiny: bool) -> Iterator[Steps]:
    about = about | _package()
    yield from (replace(row, **about) for row in (*flat(), *all_schedules(tiny=tiny), *against_revolve()))


def _package() -> dict[str, str]:
    return {"checkpoint_schedules": provenance.versions("checkpoint-schedules").get("checkpoint-schedules", "")}


def _row(name: str, title: str, steps: int, slots: int, counts: schedules.Counts, interval: int | None = None) -> Steps:
    alone = steps + schedules.recomputed(steps, slots)
    return Steps(
        table=name, schedule=title, steps=steps, slots=slots, interval=interval, forward_steps=counts.forward_steps,
        per_step=counts.forward_steps / steps, stored=counts.writes,
        of_revolve=(counts.forward_steps + BACKWARD * steps) / (alone + BACKWARD * steps),
    )  # fmt: skip


def flat() -> list[Steps]:
    rows = []
    for n in (200, 1000, 5000):
        two = schedules.count(schedules.two_level(INTERVAL, SLOTS), n)
        rows.append(_row("flat", "two levels", n, SLOTS, two, INTERVAL))
        rows.append(_row("flat", "Revolve", n, SLOTS, schedules.count(schedules.in_memory(n, SLOTS), n)))
    return rows


def all_schedules(*, tiny: bool) -> list[Steps]:
    """Count every schedule of the package for 100 and 1000 steps."""
    made, rows = schedules.package(), []
    for steps in (100,) if tiny else (100, 1000):
        root = isqrt(steps - 1) + 1
        chosen: list[tuple[str, int, int | None, Callable[[], Any]]] = [
            ("Revolve", SLOTS, None, lambda n=steps: schedules.in_memory(n, SLOTS)),
            ("two levels", SLOTS, INTERVAL, lambda: schedules.two_level(INTERVAL, SLOTS)),
            ("two levels", SLOTS, 10, lambda: schedules.two_level(10, SLOTS)),
            ("double checkpointing", SLOTS, root, lambda r=root: schedules.two_level(r, SLOTS)),
            ("double checkpointing", root, root, lambda r=root: schedules.two_level(r, r)),
        ]
        for cost in (0.5, 2, 10):
            title = f"H-Revolve, {_DISK} in the store, transfer {cost:g}"
            chosen.append((title, SLOTS, None, partial(schedules.hierarchical, steps, SLOTS, _DISK, cost, cost)))
        title = "disk-Revolve, any number in the store"
        chosen.append((title, SLOTS, None, partial(made.DiskRevolve, steps, SLOTS)))
        for title, slots, interval, make in chosen:
            rows.append(_row("schedules", title, steps, slots, schedules.count(make(), steps), interval))
    return rows


def against_revolve() -> list[Steps]:
    """Count two levels for many intervals, on the shortest chain from which on they never lose, and on long ones."""
    rows = []
    for slots in (3, SLOTS, 12):
        for interval in (1, 2, 5, 10, 20, 50, 100, 200):
            least = fewest_steps(interval, slots)
            for name, steps in (("least", least), ("long", 1000), ("long", 10_000)):
                forward = schedules.two_level_steps(steps, interval, slots)
                counts = schedules.Counts(forward, writes=-(-steps // interval))
                rows.append(_row(name, "two levels", steps, slots, counts, interval))
    return rows


def fewest_steps(interval: int, slots: int, most: int = 5000) -> int:
    """Return the least number of steps from which on two levels never take more forward steps than Revolve."""
    two, revolve = schedules.two_level_steps, schedules.recomputed
    return 1 + max((n for n in range(1, most) if two(n, interval, slots) > n + revolve(n, slots)), default=0)


_MILLISECONDS = (1, 2, 5, 10, 20, 50)
_SECONDS = 0.8  # about how long a plain loop of each row would run backwards and forwards
_FEWEST = 12  # steps
_RUNS = 3  # of each variant, which take turns
_COMPARED = 10  # steps whose gradients are compared with the plain loop's, which keeps the graphs of all of them


@dataclass(frozen=True, kw_only=True)
class Waits(Origin):
    """One sweep with a real folder, measured."""

    milliseconds: float  # what a step was made to last
    state_bytes: int  # bytes of a state
    steps: int  # steps of the chain
    filesystem: str = ""  # type of the folder's filesystem; empty where the system does not say
    samples: int = 0  # runs of each variant; times are those of the median run
    slots: int  # states in fast memory
    step_seconds: float = 0.0  # time of a step, as the sweep measured it
    transfer_seconds: float = 0.0  # time of a transfer, as it measured it
    interval: int | None = None  # what it chose; empty if it used no store
    forward_steps: int = 0  # forward steps in all
    seconds: float = 0.0  # time of both passes
    waited_forward: float = 0.0  # seconds of them that the forward pass waited for the store
    waited_backward: float = 0.0  # seconds of them that the backward pass waited for it
    share: float = 0.0  # share of the time that was waited
    revolve_seconds: float = 0.0  # time of Revolve alone with as many slots, in the same run
    of_revolve: float = 0.0  # time by that
    expected: float = 0.0  # the same, from the counts
    checkpoint_schedules: str = ""  # version of the package
    seed: int = 0  # seed of the initial state


def waits(about: dict[str, Any], tiny: bool) -> Iterator[Waits]:
    """Run sweeps with a folder and without, for steps of 1 to 50 ms, in one thread: the other one is the store's."""
    with threads(1):
        torch.manual_seed(0)
        for milliseconds in (1,) if tiny else _MILLISECONDS:
            yield replace(_waits(milliseconds, tiny), **about | _package() | {"threads": 1})


def _waits(milliseconds: int, tiny: bool) -> Waits:
    size = 1 << (12 if tiny else 20)
    steps = 30 if tiny else max(_FEWEST, min(1000, int(_SECONDS / (milliseconds * 1e-3) / 3)))
    step, state = step_of(milliseconds * 1e-3, size), torch.randn(size)
    with tempfile.TemporaryDirectory() as folder:
        compare(step, state, Path(folder))
        stored, alone = [], []
        for _ in range(_RUNS):
            stored.append(_timed(step, state, steps, store=folder))
            alone.append(_timed(step, state, steps))
            _check(stored[-1].gradient, alone[-1].gradient)
        filesystem = filesystem_of(Path(folder))
    seconds, report, revolve = _median(stored).seconds, _median(stored).report, _median(alone).seconds
    counted = steps + schedules.recomputed(steps, SLOTS)
    return Waits(
        milliseconds=milliseconds, state_bytes=size * 4, steps=steps, filesystem=filesystem, samples=_RUNS, slots=SLOTS,
        step_seconds=report.step_seconds or 0.0, transfer_seconds=report.transfer_seconds or 0.0,
        interval=report.interval, forward_steps=report.forward_steps, seconds=seconds,
        waited_forward=report.waited_forward, waited_backward=report.waited_backward, share=report.waited / seconds,
        revolve_seconds=revolve, of_revolve=seconds / revolve,
        expected=(report.forward_steps + BACKWARD * steps) / (counted + BACKWARD * steps),
    )  # fmt: skip


def step_of(seconds: float, size: int) -> Callable[[int, Tensor], Tensor]:
    """Make a step that lasts about so long, and as twice as long backwards: sines and products of large vectors."""

    def step(number: int, u: Tensor, count: int = 1) -> Tensor:
        for _ in range(count):
            u = torch.sin(u) * 1.01
        return u

    u = torch.randn(size)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        step(0, u)
        times.append(time.perf_counter() - begin)
    return partial(step, count=max(1, round(seconds / sorted(times)[10])))


@dataclass(frozen=True)
class _Timed:
    seconds: float
    report: SweepReport
    gradient: Tensor


def _timed(step: Callable[[int, Tensor], Tensor], state: Tensor, steps: int, **options: Any) -> _Timed:
    u, report = state.clone().requires_grad_(), SweepReport()
    begin = time.perf_counter()
    (gradient,) = torch.autograd.grad(sweep(step, u, steps, slots=SLOTS, report=report, **options).sum(), u)
    return _Timed(time.perf_counter() - begin, report, gradient)


def _median(runs: list[_Timed]) -> _Timed:
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


def compare(step: Callable[[int, Tensor], Tensor], state: Tensor, folder: Path) -> None:
    """Compare gradients with the plain loop's; this also warms up the steps, the schedules and the folder."""
    u = state.clone().requires_grad_()
    final = u
    for number in range(_COMPARED):
        final = step(number, final)
    (expected,) = torch.autograd.grad(final.sum(), u)
    for options in ({}, {"store": folder}, {"store": folder, "interval": 3}):
        _check(_timed(step, state, _COMPARED, **options).gradient, expected)


def _check(found: Tensor, expected: Tensor) -> None:
    if not torch.equal(found, expected):
        error = float((found - expected).abs().max())
        raise RuntimeError(f"A sweep's gradient must be the plain loop's to the bit, got a difference of {error:g}.")


def filesystem_of(folder: Path) -> str:
    """Return the type of a folder's filesystem, or nothing where the system has no list of mounts."""
    mounts = Path("/proc/self/mounts")
    if not mounts.is_file():
        return ""
    # Of those at one place the last, and of places the deepest.
    kinds = {Path(where): kind for _, where, kind, *_ in map(str.split, mounts.read_text().splitlines())}
    return next((kinds[place] for place in (folder.resolve(), *folder.resolve().parents) if place in kinds), "")


def plot(rows: Sequence[Waits]) -> Any:
    figure, (left, right) = figure_of(1, 2)
    x = [row.milliseconds for row in rows]
    how = {"marker": "s", "ls": "--", "color": RED}
    left.plot(x, [100 * row.waited_forward / row.seconds for row in rows], marker="o", color=BLUE, label="forward")
    left.plot(x, [100 * row.waited_backward / row.seconds for row in rows], **how, label="backward")
    left.set(xlabel="a step, ms", ylabel="waited for the store, % of the run", ylim=(0, None))
    right.plot(x, [row.of_revolve for row in rows], marker="o", color=BLUE, label="measured")
    right.plot(x, [row.expected for row in rows], **how, label="from the counts")
    right.axhline(1, color="black", linewidth=1)
    right.set(xlabel="a step, ms", ylabel="time relative to Revolve alone", ylim=(0, None))
    for axis in (left, right):
        x_ticks(axis, x, [f"{value:.3g}" for value in x])
        axis.legend()
    return headed(figure, "Sweeps with a folder", rows)
