"""Schedules of the package checkpoint-schedules, and their counts in closed form.

A schedule is an iterator of actions: advance from step to step, store the state before a step, fetch one, run one step
backwards. Which of them to take is decided here; what the actions mean to PyTorch is in ``sweep_run.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from typing import Any

from rmm_linear._support.installing import INSTALL_PLANNING


def package() -> Any:
    try:
        return importlib.import_module("checkpoint_schedules")
    except ImportError as missing:
        raise ImportError(
            f"sweep needs the package checkpoint-schedules, which is not installed. Run {INSTALL_PLANNING}."
        ) from missing


def in_memory(steps: int, slots: int) -> Any:
    """Return Revolve's schedule, the optimum for states in fast memory alone."""
    # The package's class Revolve makes the same schedule by a search: 48 s instead of 12 ms for 1000 steps.
    return package().MultistageCheckpointSchedule(steps, slots, 0)


def two_level(interval: int, slots: int) -> Any:
    """Return Kukreja's schedule: every ``interval``-th state in the store, Revolve's between two of them."""
    made = package()
    return made.TwoLevelCheckpointSchedule(interval, slots - 1, binomial_storage=made.StorageType.RAM)


def hierarchical(steps: int, ram: int, disk: int, write: float, read: float) -> Any:
    """Return H-Revolve's schedule for two levels: ``ram`` counts the initial state, times are in forward steps."""
    return package().HRevolve(steps, ram, disk, wd=write, rd=read)


def recomputed(steps: int, slots: int) -> int:
    """Return how many forward steps Revolve adds to the first run, in closed form (Griewank & Walther 2000)."""
    repeats = 0
    while comb(slots + repeats, slots) < steps:
        repeats += 1
    return repeats * steps - comb(slots + repeats, slots + 1)


def two_level_steps(steps: int, interval: int, slots: int) -> int:
    """Return the forward steps of :func:`two_level`, those of the first run included."""
    whole, rest = divmod(steps, interval)
    last = rest + recomputed(rest, slots) if rest else 0
    return steps + whole * (interval + recomputed(interval, slots)) + last


@dataclass
class Counts:
    """Forward steps of a schedule, recorded ones too; most states in fast memory and in the store; writes and reads."""

    forward_steps: int = 0
    ram: int = 0
    disk: int = 0
    writes: int = 0
    reads: int = 0


def count(schedule: Any, steps: int) -> Counts:
    """Go through a schedule without running a step."""
    made, counts, below = package(), Counts(), steps
    held: dict[Any, set[int]] = {storage: set() for storage in made.StorageType}
    ram, disk = made.StorageType.RAM, made.StorageType.DISK

    def on_forward(action: Any) -> None:
        if action.write_ics:
            held[action.storage].add(action.n0)
            counts.writes += action.storage == disk
            counts.ram, counts.disk = max(counts.ram, len(held[ram])), max(counts.disk, len(held[disk]))
        counts.forward_steps += min(action.n1, steps) - action.n0
        if schedule.max_n is None and action.n1 >= steps:
            schedule.finalize(steps)

    def on_fetch(action: Any) -> None:
        counts.reads += action.from_storage == disk
        if isinstance(action, made.Move):
            held[action.from_storage].discard(action.n)

    actions: dict[type, Callable[[Any], None]] = {made.Forward: on_forward, made.Copy: on_fetch, made.Move: on_fetch}
    for action in schedule:
        if isinstance(action, made.EndReverse):
            return counts
        if isinstance(action, made.Reverse):
            below = action.n0
            for storage in (ram, disk):  # what lies above is never asked for again, whether the schedule says so or not
                held[storage] -= {number for number in held[storage] if number >= below}
        elif type(action) in actions:
            actions[type(action)](action)
    raise ValueError("A schedule must end with EndReverse.")
