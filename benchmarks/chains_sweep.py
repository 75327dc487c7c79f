"""Sweeps: forward steps of all schedules, which are counted, and the time that a real folder makes them wait."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.chains_sweep_counts import BACKWARD, SLOTS, counts, tables
from benchmarks.plots import figure_of
from benchmarks.records import Origin, write_rows
from rmm_linear._support import provenance
from rmm_linear._support.tables import table
from rmm_linear.planning import SweepReport, sweep
from rmm_linear.planning.chains import schedules

_MILLISECONDS = (1, 2, 5, 10, 20, 50)
_SECONDS = 0.8  # about how long a plain loop of each row would run backwards and forwards
_FEWEST = 12  # steps
_RUNS = 3  # of each variant, which take turns
_COMPARED = 10  # steps whose gradients are compared with the plain loop's, which keeps the graphs of all of them


@dataclass(frozen=True, kw_only=True)
class Waits(Origin):
    """One sweep with a real folder, measured.

    Attributes:
        milliseconds: What a step was made to last.
        state_bytes: Bytes of a state.
        filesystem: Type of the folder's filesystem; empty where the system does not say.
        samples: Runs of each variant; times are those of the median run.
        steps: Steps of the chain.
        slots: States in fast memory.
        step_seconds: Time of a step, as the sweep measured it.
        transfer_seconds: Time of a transfer, as it measured it.
        interval: What it chose; empty if it used no store.
        forward_steps: Forward steps in all.
        seconds: Time of both passes.
        waited_forward: Seconds of them that the forward pass waited for the store.
        waited_backward: Seconds of them that the backward pass waited for it.
        share: Share of the time that was waited.
        revolve_seconds: Time of Revolve alone with as many slots, in the same run.
        of_revolve: Time by that.
        expected: The same, from the counts.
        checkpoint_schedules: Version of the package.
        seed: Seed of the initial state.
    """

    milliseconds: float
    state_bytes: int
    steps: int
    filesystem: str = ""
    samples: int = 0
    slots: int
    step_seconds: float = 0.0
    transfer_seconds: float = 0.0
    interval: int | None = None
    forward_steps: int = 0
    seconds: float = 0.0
    waited_forward: float = 0.0
    waited_backward: float = 0.0
    share: float = 0.0
    revolve_seconds: float = 0.0
    of_revolve: float = 0.0
    expected: float = 0.0
    checkpoint_schedules: str = ""
    seed: int = 0


def run(out: Path, about: dict[str, Any], tiny: bool) -> str:
    """Write the csv files and the picture of sweeps.

    Args:
        out: Folder of the files.
        about: Where the rows come from, see :func:`benchmarks.records.origin`.
        tiny: Whether to take small sizes, to try the command.

    Returns:
        All tables.
    """
    about = about | {
        "checkpoint_schedules": provenance.versions("checkpoint-schedules").get("checkpoint-schedules", "")
    }
    counted = [dataclasses.replace(row, **about) for row in counts(tiny=tiny)]
    write_rows(out / "chains-sweep-steps.csv", counted)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the other processor is the store's
    try:
        rows = [dataclasses.replace(row, **about | {"threads": 1}) for row in waits(tiny=tiny)]
    finally:
        torch.set_num_threads(threads)
    write_rows(out / "chains-sweep-waits.csv", rows)
    plot(rows).savefig(out / "chains-sweep-waits.png", dpi=150)
    return f"{tables(counted)}\n\n{waits_table(rows)}"


def waits(*, tiny: bool) -> list[Waits]:
    """Run sweeps with a folder and without, for steps of 1 to 50 ms."""
    torch.manual_seed(0)
    size = 1 << (12 if tiny else 20)
    rows = []
    for milliseconds in (1,) if tiny else _MILLISECONDS:
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
        seconds, report = _median(stored).seconds, _median(stored).report
        counted = steps + schedules.recomputed(steps, SLOTS)
        rows.append(
            Waits(
                milliseconds=milliseconds,
                state_bytes=size * 4,
                steps=steps,
                filesystem=filesystem,
                samples=_RUNS,
                slots=SLOTS,
                step_seconds=report.step_seconds or 0.0,
                transfer_seconds=report.transfer_seconds or 0.0,
                interval=report.interval,
                forward_steps=report.forward_steps,
                seconds=seconds,
                waited_forward=report.waited_forward,
                waited_backward=report.waited_backward,
                share=report.waited / seconds,
                revolve_seconds=_median(alone).seconds,
                of_revolve=seconds / _median(alone).seconds,
                expected=(report.forward_steps + BACKWARD * steps) / (counted + BACKWARD * steps),
            )
        )
    return rows


def step_of(seconds: float, size: int) -> Callable[[int, Tensor], Tensor]:
    """Make a step that lasts about so long, and as twice as long backwards: sines and products of large vectors."""

    def repeated(count: int) -> Callable[[int, Tensor], Tensor]:
        def step(number: int, u: Tensor) -> Tensor:
            for _ in range(count):
                u = torch.sin(u) * 1.01
            return u

        return step

    u = torch.randn(size)
    one = repeated(1)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        one(0, u)
        times.append(time.perf_counter() - begin)
    return repeated(max(1, round(seconds / sorted(times)[10])))


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
    """Compare gradients with the plain loop's; this also warms up the steps, the schedules and the folder.

    Args:
        step: A step.
        state: Initial state.
        folder: Folder of the store.

    Raises:
        RuntimeError: If a sweep's gradient is another, so that its time would mean nothing.
    """
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
    places = [folder.resolve(), *folder.resolve().parents]
    lines = [line.split() for line in mounts.read_text().splitlines()]
    found = [
        (places.index(Path(where)), -number, kind)
        for number, (_, where, kind, *_) in enumerate(lines)
        if Path(where) in places
    ]
    return min(found)[2] if found else ""  # the deepest, and of those at one place the last


def waits_table(rows: Sequence[Waits]) -> str:
    """Return the table of what was measured."""
    header = ("step, ms", "steps", "transfer, ms", "interval", "forward steps", "waited", "of Revolve", "from counts")
    lines = [
        (
            f"{row.step_seconds * 1e3:.1f}",
            str(row.steps),
            f"{row.transfer_seconds * 1e3:.1f}",
            str(row.interval or "no store"),
            f"{row.forward_steps / row.steps:.2f}",
            f"{row.share:.1%}",
            f"{row.of_revolve:.2f}",
            f"{row.expected:.2f}",
        )
        for row in rows
    ]
    where = f"A folder on {rows[0].filesystem}" if rows[0].filesystem else "A folder"
    state = f"{rows[0].state_bytes / 2**20:g} MiB per state"
    title = f"{where}, {state}, {SLOTS} slots, interval as measured, medians of {rows[0].samples} runs:"
    return f"{title}\n\n{table(header, lines)}"


def plot(rows: Sequence[Waits]) -> Any:
    """Plot the share of the time that was waited, and the time by Revolve's, against a step's time, as a figure."""
    figure, (left, right) = figure_of(1, 2)
    x = [row.milliseconds for row in rows]
    left.plot(x, [100 * row.waited_forward / row.seconds for row in rows], marker="o", color="#0072b2", label="forward")
    left.plot(
        x,
        [100 * row.waited_backward / row.seconds for row in rows],
        marker="s",
        ls="--",
        color="#d55e00",
        label="backward",
    )
    left.set(xscale="log", xlabel="a step, ms", ylabel="waited for the store, % of the run", ylim=(0, None))
    right.plot(x, [row.of_revolve for row in rows], marker="o", color="#0072b2", label="measured")
    right.plot(x, [row.expected for row in rows], marker="s", ls="--", color="#d55e00", label="from the counts")
    right.axhline(1, color="black", linewidth=1)
    right.set(xscale="log", xlabel="a step, ms", ylabel="time by that of Revolve alone", ylim=(0, None))
    for axis in (left, right):
        axis.set_xticks(x, [f"{value:.3g}" for value in x])
        axis.set_xticks([], minor=True)
        axis.legend()
    about = rows[0]
    figure.suptitle(
        f"Sweeps with a folder\n{about.machine}, {about.threads} threads, PyTorch {about.torch}", fontsize=11
    )
    return figure
