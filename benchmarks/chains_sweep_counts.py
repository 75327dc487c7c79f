"""Forward steps of all schedules for chains, counted: nothing runs, so they are the same on every machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

from benchmarks.records import Origin
from rmm_linear._support.tables import table
from rmm_linear.planning.chains import schedules

SLOTS, INTERVAL = 6, 50
BACKWARD = 2  # time of a step's backward pass, in forward steps
_DISK = 10  # slots of H-Revolve's second level


@dataclass(frozen=True, kw_only=True)
class Steps(Origin):
    """What one schedule does with a chain, counted.

    Attributes:
        table: Which table the row belongs to.
        schedule: Title of the schedule.
        steps: Steps of the chain.
        slots: States in fast memory.
        interval: Steps between stored states; empty where there is no such number.
        forward_steps: Forward steps in all.
        per_step: The same per step of the chain.
        stored: States that go to the store; a sweep leaves out the first of them, the initial one.
        of_revolve: Time by that of Revolve with as many slots, a backward step being two forward steps.
        checkpoint_schedules: Version of the package.
        seed: None is used; nothing is random.
    """

    table: str
    schedule: str
    steps: int
    slots: int
    interval: int | None = None
    forward_steps: int = 0
    per_step: float = 0.0
    stored: int = 0
    of_revolve: float = 0.0
    checkpoint_schedules: str = ""
    seed: int = 0


def counts(*, tiny: bool) -> list[Steps]:
    """Count all that the tables show."""
    return [*flat(), *all_schedules(tiny=tiny), *against_revolve()]


def _row(name: str, title: str, steps: int, slots: int, counts: schedules.Counts, interval: int | None = None) -> Steps:
    alone = steps + schedules.recomputed(steps, slots)
    return Steps(
        table=name,
        schedule=title,
        steps=steps,
        slots=slots,
        interval=interval,
        forward_steps=counts.forward_steps,
        per_step=counts.forward_steps / steps,
        stored=counts.writes,
        of_revolve=(counts.forward_steps + BACKWARD * steps) / (alone + BACKWARD * steps),
    )


def flat() -> list[Steps]:
    """Count two levels and Revolve for chains of growing length."""
    rows = []
    for steps in (200, 1000, 5000):
        two = schedules.count(schedules.two_level(INTERVAL, SLOTS), steps)
        alone = schedules.count(schedules.in_memory(steps, SLOTS), steps)
        rows.append(_row("flat", "two levels", steps, SLOTS, two, INTERVAL))
        rows.append(_row("flat", "Revolve", steps, SLOTS, alone))
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
            *(
                (
                    f"H-Revolve, {_DISK} in the store, transfer {cost:g}",
                    SLOTS,
                    None,
                    lambda n=steps, c=cost: schedules.hierarchical(n, SLOTS, _DISK, c, c),
                )
                for cost in (0.5, 2, 10)
            ),
            ("disk-Revolve, any number in the store", SLOTS, None, lambda n=steps: made.DiskRevolve(n, SLOTS)),
        ]
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
                counts = schedules.Counts(
                    schedules.two_level_steps(steps, interval, slots), writes=-(-steps // interval)
                )
                rows.append(_row(name, "two levels", steps, slots, counts, interval))
    return rows


def fewest_steps(interval: int, slots: int, most: int = 5000) -> int:
    """Return the least number of steps from which on two levels never take more forward steps than Revolve."""
    loses = [
        steps
        for steps in range(1, most)
        if schedules.two_level_steps(steps, interval, slots) > steps + schedules.recomputed(steps, slots)
    ]
    return max(loses, default=0) + 1


def tables(rows: Sequence[Steps]) -> str:
    """Return the tables of what was counted."""
    parts = [f"Forward steps per step, {SLOTS} slots, interval {INTERVAL}:"]
    chosen = [row for row in rows if row.table == "flat"]
    lengths = list(dict.fromkeys(row.steps for row in chosen))
    titles = list(dict.fromkeys(row.schedule for row in chosen))
    cells = {(row.schedule, row.steps): f"{row.per_step:.2f}" for row in chosen}
    parts.append(table(("", *map(str, lengths)), [(t, *(cells[t, n] for n in lengths)) for t in titles]))
    parts.append("All schedules:")
    parts.append(
        table(
            ("schedule", "steps", "slots", "interval", "forward steps", "per step", "stored"),
            [
                (
                    r.schedule,
                    *map(str, (r.steps, r.slots, r.interval or "", r.forward_steps)),
                    f"{r.per_step:.2f}",
                    str(r.stored),
                )
                for r in rows
                if r.table == "schedules"
            ],
        )
    )
    parts.append(
        "Two levels and Revolve: from which length on they never take more steps, and their time by Revolve's:"
    )
    found = {(r.slots, r.interval, r.table, r.steps): r for r in rows if r.table == "long"}
    lines = []
    for least in (r for r in rows if r.table == "least"):
        shares = [f"{found[least.slots, least.interval, 'long', n].of_revolve:.2f}" for n in (1000, 10_000)]
        lines.append((str(least.slots), str(least.interval), str(least.steps), *shares))
    parts.append(table(("slots", "interval", "from steps", "1,000 steps", "10,000 steps"), lines))
    return "\n\n".join(parts)
