"""Count the forward steps of backpropagation through t steps in m slots, and find where to split.

The state at the beginning is at hand, and one step at a time can be recorded for its backward pass. A slot holds one
more state; the graph of a recorded step, which lasts until its backward pass, takes a slots. With nothing stored,
C(0, t) = t(t + 1)/2: the steps up to the last one, then those up to the one before. Else

    C(m, t) = min { y + C(m, y) + D(m-1, t-y),        1 ≤ y < t    run y steps and store the state
                    y + C(m, y-1) + C(m-a, t-y) }     1 ≤ y ≤ t    run y - 1 steps, record the y-th and save its graph

(Gruslys et al. 2016: hidden states alone, internal states alone where a = 1, both in the mixed case, with C in the
place of D). D is the same for a state that is in a slot of its own, not counted in m. It has one more choice, which the
paper has not: once the first step's graph is saved, nothing begins at the state again, and its slot is free.

    D(m, t) = min { y + D(m, y) + D(m-1, t-y),        1 ≤ y < t
                    y + D(m, y-1) + C(m-a, t-y),      2 ≤ y ≤ t
                    1 + C(m-a+1, t-1) }                            take the state out of its slot, record the first step

No schedule takes fewer steps: up to 7 steps a search over all that can be done says so. `Table` is this recurrence for
all m and t. It takes about 2·m·t² additions.

`Envelope` takes O(m) instead. Let G(m, λ) = max_t [λt - C(m, t)], H the same of D. An infimal convolution turns into a
sum, a minimum into a maximum:

    G(m, λ) = max { G(m, λ-1) + H(m-1, λ),   λ - 1 + G(m, λ-1) + G(m-a, λ) },        G(0, λ) = λ(λ - 1)/2
    H(m, λ) = max { H(m, λ-1) + H(m-1, λ),   λ - 1 + H(m, λ-1) + G(m-a, λ),   λ - 1 + G(m-a+1, λ) }

and C(m, t) ≥ max_λ [λt - G(m, λ)] for whole λ, the number of times that the last steps run. With hidden states alone,
or a = 1, C is convex in t with whole slopes, and the bound is C itself (Revolve's binomials). In the mixed case C lies
above it where both kinds of slots meet; a split in the middle of where the bound is attained is then a good one, not
always the best one.
"""

from __future__ import annotations

import functools
from typing import ClassVar, Protocol

import torch
from torch import Tensor

TABLE_LIMIT = 2 * 10**9  # m·t² of a table: some seconds
ROOM_LIMIT = 4 * 10**6  # m·t of a table: 64 MB


class Splits(Protocol):
    """Find where to split steps."""

    def split(self, slots: int, steps: int, *, is_stored: bool = False) -> int:
        """Say what to do first with steps and slots.

        y > 0: store the state after y steps. y < 0: record step -y and save its graph. 0: record the last step.
        ``is_stored``: the state at the beginning has a slot of its own, which -1 frees before a graph is saved.
        """
        ...


def splits(steps: int, slots: int, internal_cost: int | None) -> Splits:
    """Choose where to split; where a state and a graph differ in size, least only if a table is affordable."""
    if internal_cost is not None and slots >= internal_cost * (steps - 1):
        return AllGraphs()
    if _is_bound_attained(steps, slots, internal_cost) or not _is_affordable(steps, slots):
        return Envelope.of(steps, slots, internal_cost)
    return Table.of(steps, slots, internal_cost or 1)


def is_exact(steps: int, slots: int, internal_cost: int | None) -> bool:
    """Say whether :func:`splits` has the least forward steps of all plans, by proof or by search."""
    return _is_bound_attained(steps, slots, internal_cost) or _is_affordable(steps, slots)


def _is_bound_attained(steps: int, slots: int, internal_cost: int | None) -> bool:
    """Say whether the envelope is C itself: one kind of slots, or room for all graphs."""
    return internal_cost in (None, 1) or slots >= internal_cost * (steps - 1)


def _is_affordable(steps: int, slots: int) -> bool:
    """Say whether a table takes no more than some seconds, and some megabytes."""
    return slots * steps * steps <= TABLE_LIMIT and slots * steps <= ROOM_LIMIT


class AllGraphs:
    """Every step is recorded when it first runs, for there are slots for all graphs."""

    def split(self, slots: int, steps: int, *, is_stored: bool = False) -> int:
        return -1


class Table:
    """C(m, t) for all m and t in question, with both kinds of slots."""

    _last: ClassVar[list[Table]] = []

    @classmethod
    def of(cls, steps: int, slots: int, internal_cost: int) -> Table:
        """Make a table, or take one of the last two: one for more steps or more slots has the smaller ones in it."""
        for table in cls._last:
            most_slots, most_steps = (size - 1 for size in table.cost.shape)
            if table.internal_cost == internal_cost and slots <= most_slots and steps <= most_steps:
                break
        else:
            table = cls(steps, slots, internal_cost)
        Table._last = [table, *(one for one in cls._last if one is not table)][:2]
        return table

    def __init__(self, steps: int, slots: int, internal_cost: int) -> None:
        """Fill the table up to ``steps`` and ``slots``."""
        self.internal_cost, a = internal_cost, internal_cost
        self._found: dict[tuple[int, int, bool], int] = {}
        dtype = torch.int32 if steps < 60_000 else torch.int64
        shape = {"dtype": dtype, "device": "cpu"}
        # C and D: (m, y); y + that; and (m, steps - t), read from left to right, as the sums over y run.
        costs, aheads, reverses = (torch.zeros(2, slots + 1, steps + 1, **shape) for _ in range(3))
        room = torch.empty((slots + 1) * (steps + 1), **shape)

        def least_sum(ahead: Tensor, reverse: Tensor) -> Tensor:
            sums = room[: ahead.numel()].view(ahead.shape)
            return torch.add(ahead, reverse, out=sums).amin(1)

        for t in range(1, steps + 1):
            for is_stored, (cost, ahead, reverse) in enumerate(zip(costs, aheads, reverses, strict=True)):
                least = torch.full((slots + 1,), t * (t + 1) // 2, **shape)
                if t > 1 and slots:
                    found = least_sum(ahead[1:, 1:t], reverses[1, :-1, steps - t + 1 : steps])
                    torch.minimum(least[1:], found, out=least[1:])
                first = 1 if is_stored else 0  # y - 1
                if slots >= a and t > first:
                    graphs = reverses[0, : slots + 1 - a, steps - t + 1 + first :]
                    torch.minimum(least[a:], least_sum(ahead[a:, first:t], graphs) + 1, out=least[a:])
                if is_stored and slots >= a - 1:
                    torch.minimum(least[a - 1 :], costs[0, : slots + 2 - a, t - 1] + 1, out=least[a - 1 :])
                cost[:, t], ahead[:, t], reverse[:, steps - t] = least, least + t, least
        self.cost, self.stored_cost = costs

    def split(self, slots: int, steps: int, *, is_stored: bool = False) -> int:
        key = slots, steps, is_stored
        if key not in self._found:
            self._found[key] = self._search(*key)
        return self._found[key]

    def _search(self, slots: int, steps: int, is_stored: bool) -> int:
        """Return a split that has the steps of the table; one that saves a graph, where there is one."""
        a, t = self.internal_cost, steps
        own = self.stored_cost if is_stored else self.cost
        least = int(own[slots, t])
        y = torch.arange(t + 1, device="cpu")
        if is_stored and slots >= a - 1 and int(self.cost[slots - a + 1, t - 1]) + 1 == least:
            return -1
        if slots >= a:
            internal = y[1:] + own[slots, :t] + self.cost[slots - a, :t].flip(0)
            if int(internal.min()) == least:
                return -1 - int(internal.argmin())
        if slots and t > 1:
            hidden = y[1:t] + own[slots, 1:t] + self.stored_cost[slots - 1, 1:t].flip(0)
            if int(hidden.min()) == least:
                return 1 + int(hidden.argmin())
        return 0


class Envelope:
    """The bound max_λ [λt - G(m, λ)], and splits by it."""

    @classmethod
    @functools.lru_cache(maxsize=8)
    def of(cls, steps: int, slots: int, internal_cost: int | None) -> Envelope:
        """Make the bound, or take one of the last eight."""
        return cls(steps, slots, internal_cost)

    def __init__(self, steps: int, slots: int, internal_cost: int | None) -> None:
        """Compute G(m, λ) for all ``slots``, and for λ until ``steps`` are reached."""
        self.internal_cost, a = internal_cost, internal_cost
        self._found: dict[tuple[int, int, bool], int] = {}
        most = int((2 * steps) ** 0.5) + 3  # slopes of C(1, t), the steepest one but C(0, t)
        plain = [level * (level - 1) // 2 for level in range(most + 2)]
        stored = [value + max(level - 1, 0) for level, value in enumerate(plain)] if a == 1 else plain
        self.rows, self.stored_rows = [plain], [stored]
        for m in range(1, slots + 1):
            graphs = self.rows[m - a] if a is not None and m >= a else None
            self.rows.append(_row(self.stored_rows[m - 1], graphs, None, steps))
            taken = self.rows[m - a + 1] if a is not None and m >= a - 1 else None
            self.stored_rows.append(_row(self.stored_rows[m - 1], graphs, taken, steps))

    def least(self, slots: int, steps: int) -> int:
        if slots == 0:
            return steps * (steps + 1) // 2
        return int(_bounds(self.rows, slots, torch.tensor([steps], device="cpu")))

    def split(self, slots: int, steps: int, *, is_stored: bool = False) -> int:
        key = slots, steps, is_stored
        if key not in self._found:
            self._found[key] = self._search(*key)
        return self._found[key]

    def _search(self, slots: int, steps: int, is_stored: bool) -> int:
        """Return the split with the least sum of the bounds of both sides; of several, the one in the middle."""
        a, t = self.internal_cost, steps
        own = self.stored_rows if is_stored else self.rows
        y = torch.arange(t + 1, device="cpu")
        choices = [(t * (t + 1) // 2, 0)]
        if a is not None and is_stored and slots >= a - 1 and t > 1:
            choices.append((1 + int(_bounds(self.rows, slots - a + 1, y[t - 1 : t])), -1))
        if a is not None and slots >= a:
            internal = y[1:] + _bounds(own, slots, y[:t]) + _bounds(self.rows, slots - a, t - y[1:])
            least = internal.min()
            choices.append((int(least), -1 - _middle(internal == least)))
        if slots and t > 1:
            hidden = y[1:t] + _bounds(own, slots, y[1:t]) + _bounds(self.stored_rows, slots - 1, t - y[1:t])
            least = hidden.min()
            choices.append((int(least), 1 + _middle(hidden == least)))
        return min(choices)[1]


def _row(below: list[int], graphs: list[int] | None, taken: list[int] | None, steps: int) -> list[int]:
    """G(m, ·) or H(m, ·) until ``steps`` are reached, from H(m-1, ·), G(m-a, ·), and for H from G(m-a+1, ·)."""
    row = [0]
    while len(row) < len(below):
        level = len(row)
        value = row[-1] + below[level]
        if graphs is not None:
            value = max(value, level - 1 + row[-1] + graphs[level])
        if taken is not None and level < len(taken):
            value = max(value, level - 1 + taken[level])
        row.append(value)
        if row[-1] - row[-2] >= steps:  # the steps that run at most level - 1 times
            break
    return row


def _bounds(rows: list[list[int]], slots: int, steps: Tensor) -> Tensor:
    """Return the bound for many t at once."""
    if slots == 0:
        return steps * (steps + 1) // 2
    row = torch.tensor(rows[slots], device="cpu")
    level = torch.searchsorted(row.diff(), steps).clamp_(max=len(row) - 1)
    return level * steps - row[level]


def _middle(found: Tensor) -> int:
    places = found.nonzero()
    return int(places[len(places) // 2])
