"""Settings of a sweep, checked, and the report that it fills in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isqrt
from typing import Any

from rmm_linear._support.reports import Report
from rmm_linear._support.tables import keyed, table
from rmm_linear._support.validation import check_integer
from rmm_linear.planning.stores.folder import refuse_file


@dataclass(frozen=True)
class Settings:
    """Arguments of a sweep."""

    slots: int
    store: Any
    interval: int | str
    disk: int | None = None  # states in the store under levels; None otherwise
    # Time of a write and of a read under levels, in forward steps; None to measure it
    costs: tuple[float, float] | None = None

    @classmethod
    def read(cls, steps: Any, slots: Any, store: Any, interval: Any, length: Any, levels: Any) -> Settings:
        if not callable(steps) and (isinstance(steps, bool) or not isinstance(steps, int)):
            raise TypeError(
                f"steps must be a number, or a condition steps(i, state) that says whether to go on, got {steps!r}."
            )
        if isinstance(steps, int) and steps < 0:
            raise ValueError(f"steps must be at least 0, got {steps}.")
        refuse_file(store)
        check_integer("length", length, optional=True)
        if length is not None and not callable(steps):
            raise ValueError(f"length is for a condition, got steps={steps} and length={length}. Leave length out.")
        if length is not None and interval != "sqrt":
            raise ValueError(
                f'length is what interval="sqrt" takes the root of, got interval={interval!r} and length={length}. '
                "Leave length out."
            )
        if callable(steps) and (store is None or levels is not None):
            got = "no store" if store is None else "levels"
            raise ValueError(
                f"A chain whose length is not known needs a store and slots, got {got}. Give a store, for example "
                'store="cpu", and slots, or the number of steps.'
            )
        if levels is not None:
            return cls._of_levels(levels, slots, store, interval)
        check_integer("slots", slots)
        if interval == "sqrt":
            number = length if callable(steps) else steps
            if number is None:
                raise ValueError(
                    'interval="sqrt" needs to know about how many steps there are, got a condition. Give length=.'
                )
            interval = isqrt(max(number - 1, 0)) + 1  # the root, rounded up
        elif interval != "auto":
            if not isinstance(interval, int):
                raise ValueError(f'interval must be a number, "auto" or "sqrt", got {interval!r}.')
            check_integer("interval", interval)
        if interval != "auto" and store is None:
            raise ValueError("interval is how often a state goes to the store, got store=None. Give a store.")
        return cls(slots, store, interval)

    @classmethod
    def _of_levels(cls, levels: Any, slots: Any, store: Any, interval: Any) -> Settings:
        if slots is not None or interval != "auto":
            raise ValueError(
                f"levels has the slots of each level, and its schedule has no interval, got slots={slots!r} and "
                f"interval={interval!r}. Leave them out."
            )
        if store is None:
            raise ValueError('levels needs a store for its second level, got store=None. Give a folder or "cpu".')
        if not _are_levels(levels):
            raise ValueError(
                'levels must be [("ram", slots), ("disk", slots, write, read)], with times in forward steps, or '
                f'[("ram", slots), ("disk", slots)] to measure them, got {levels!r}.'
            )
        (_, ram), (_, disk, *costs) = levels
        check_integer("the slots of level ram", ram)
        check_integer("the slots of level disk", disk)
        if any(isinstance(cost, bool) or not isinstance(cost, int | float) or cost < 0 for cost in costs):
            raise ValueError(f"write and read must be times in forward steps, at least 0, got {costs}.")
        return cls(ram, store, "auto", disk, (costs[0], costs[1]) if costs else None)


def _are_levels(levels: Any) -> bool:
    if not isinstance(levels, Sequence) or not all(isinstance(level, Sequence) and level for level in levels):
        return False
    return [(level[0], len(level)) for level in levels] in ([("ram", 2), ("disk", n)] for n in (2, 4))


@dataclass(repr=False)
class SweepReport(Report):
    """The report of one :func:`sweep`; complete when its backward pass has ended, and reset by the next sweep.

    Attributes:
        steps: Steps of the chain.
        forward_steps: Times that ``step`` ran, those of the backward pass included.
        interval: Every how many steps a state went to the store; None if none had to, or for ``levels``.
        stored: States that went to the store.
        stored_bytes: Their bytes.
        read: States that came back from the store.
        step_seconds: Time of one step, where it was measured to choose the interval.
        transfer_seconds: Time in which one state goes to the store or comes back, whichever takes longer, likewise.
        waited_forward: Seconds that the forward pass waited for the store.
        waited_backward: Seconds that the backward pass waited for the store.

    Example:
        >>> report = SweepReport(steps=1000, forward_steps=4280, interval=50, stored=20, read=18)
        >>> print(report)
        sweep: steps=1000 forward_steps=4280 (4.28 per step) interval=50 stored=20 read=18 waited=0.000s
    """

    steps: int = 0
    forward_steps: int = 0
    interval: int | None = None
    stored: int = 0
    stored_bytes: int = 0
    read: int = 0
    step_seconds: float | None = None
    transfer_seconds: float | None = None
    waited_forward: float = 0.0
    waited_backward: float = 0.0

    @property
    def waited(self) -> float:
        """Seconds that both passes waited for the store."""
        return self.waited_forward + self.waited_backward

    def reset(self) -> None:
        """Forget what was filled in, as every sweep does when it begins."""
        for field in fields(self):
            setattr(self, field.name, field.default)

    def summary(self) -> str:
        """Return the report in one line, or two of 100 columns."""
        steps = f"forward_steps={self.forward_steps} ({self.forward_steps / max(self.steps, 1):.2f} per step)"
        counts = (f"interval={self.interval}", f"stored={self.stored}", f"read={self.read}")
        return keyed("sweep:", (f"steps={self.steps}", steps, *counts, f"waited={self.waited:.3f}s"))

    def __str__(self) -> str:
        return self.summary()

    def table(self) -> str:
        """Return every figure in a row.

        Returns:
            Text.
        """
        figures = ((name, "not measured" if value is None else f"{value:g}") for name, value in vars(self).items())
        return table(("sweep", ""), [*figures])

    def _records(self) -> list[dict[str, Any]]:
        return [dict(vars(self))]
