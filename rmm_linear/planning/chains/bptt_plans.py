"""Plan backpropagation through time: which steps run when, and their cost, without running anything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from rmm_linear._support.installing import INSTALL_EXTRA
from rmm_linear._support.reports import Report
from rmm_linear._support.saved_settings import SavedSettings
from rmm_linear._support.sizes import read_bytes, show_bytes
from rmm_linear._support.tables import keyed, table
from rmm_linear._support.validation import check_integer
from rmm_linear._version import __version__
from rmm_linear.planning.chains.bptt_costs import Envelope, is_exact, splits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RECORDED, _NEXT = "#0072b2", "#d55e00"
_FINEST = 64  # most slots of a graph that is measured: one of them is lost by rounding, and plans take time by slots


class Action(NamedTuple):
    """One thing that a plan does.

    "advance" runs the steps from ``step`` to ``end`` - 1, "store" saves the state before ``step``, "record" runs
    ``step`` for its backward pass and saves its graph, "backward" is the backward pass of ``step`` and drops that
    graph, "drop" drops the state before ``step``, and "take" drops it too, when the next action is the last that begins
    there. After any other action, advance and record start from the newest saved state (possibly the end of a recorded
    step).
    """

    kind: Literal["advance", "store", "record", "backward", "drop", "take"]
    step: int
    end: int = 0  # for "advance", where it ends
    is_kept: bool = False  # for "record", whether the graph waits for later steps and takes slots


@dataclass(frozen=True, repr=False)
class BPTTPlan(Report, SavedSettings):
    """A plan for so many steps in so many slots, made by :func:`plan_bptt`; printed, it is a table.

    Attributes:
        steps: T.
        slots: States that may be stored at once, the initial one not counted.
        internal_cost: Slots that the graph of a recorded step takes; None saves no graph but the current one.
        state_bytes: Bytes of a slot, a state's or somewhat more; None if they are not known.
        graph_bytes: Bytes of a recorded step's graph; None if they are not known.
        plain_bytes: Bytes that a plain run saves per step; None if they are not known.
    """

    steps: int
    slots: int
    internal_cost: int | None = None
    state_bytes: int | None = None
    graph_bytes: int | None = None
    plain_bytes: int | None = None

    version: ClassVar[str] = __version__

    def __post_init__(self) -> None:
        check_integer("steps", self.steps)
        if isinstance(self.slots, bool) or not isinstance(self.slots, int):
            raise TypeError(f"slots must be an integer, got {self.slots!r}.")
        if self.slots < 0:
            raise ValueError(f"slots must not be negative, got {self.slots}. Use 0 to store nothing.")
        for name in ("internal_cost", "state_bytes", "graph_bytes", "plain_bytes"):
            check_integer(name, getattr(self, name), optional=True)

    @property
    def forward_steps(self) -> int:
        """Steps that run, those that are repeated counted again; a plain run has T."""
        return self._totals[0]

    @property
    def slots_used(self) -> int:
        """Most slots in use at once."""
        return self._totals[1]

    @property
    def time_ratio(self) -> float:
        """Time by that of a plain run, (forward_steps / T + 2) / 3: a backward step counts as two forward ones."""
        return (self.forward_steps / self.steps + 2) / 3

    @property
    def least_forward_steps(self) -> int:
        """Forward steps that no plan of the same kind has fewer of; those of this plan where the search is exact."""
        if is_exact(self.steps, self._most_slots, self.internal_cost):
            return self.forward_steps
        return Envelope.of(self.steps, self._most_slots, self.internal_cost).least(self._most_slots, self.steps)

    @property
    def bytes(self) -> int | None:
        """Most bytes saved at once: slots in use, and the graph of the step whose backward pass runs."""
        if self.state_bytes is None:
            return None
        graph = self.graph_bytes if self.graph_bytes is not None else (self.internal_cost or 0) * self.state_bytes
        return self.slots_used * self.state_bytes + graph

    @cached_property
    def _totals(self) -> tuple[int, int]:
        forward = now = most = 0
        freed: list[int] = []
        for action in self.actions():
            if action.kind == "advance":
                forward += action.end - action.step
            elif action.kind == "record":
                forward += 1
                freed.append((self.internal_cost or 0) if action.is_kept else 0)
                now += freed[-1]
            elif action.kind == "store":
                freed.append(1)
                now += 1
            else:
                now -= freed.pop()
            most = max(most, now)
        return forward, most

    @property
    def _most_slots(self) -> int:
        """Slots beyond which every step is recorded at once, or every state stored."""
        return min(self.slots, (self.steps - 1) * (self.internal_cost or 1))

    def actions(self) -> Iterator[Action]:
        """Walk through the plan; the forward pass ends at the first "backward".

        Yields:
            The actions, in order.
        """
        chosen = splits(self.steps, self._most_slots, self.internal_cost)
        # Kept states, newest last: where, the end of the steps that are to be reversed from there, with which slots,
        # and whether the step that ends there is recorded.
        frames = [(0, self.steps, self._most_slots, False)]
        while True:
            begin, end, slots, is_recorded = frames.pop()
            if begin == end:
                if begin:
                    yield Action("backward", begin - 1) if is_recorded else Action("drop", begin)
                    continue
                return
            is_stored = begin > 0 and not is_recorded
            split = chosen.split(slots, end - begin, is_stored=is_stored)
            middle = begin + (split if split > 0 else -split - 1 if split < 0 else end - begin - 1)
            if middle > begin:
                yield Action("advance", begin, middle)
            if is_stored and split == -1 and middle + 1 < end:
                yield Action("take", begin)
                slots += 1
            else:
                frames.append((begin, middle, slots, is_recorded))
            if split > 0:
                yield Action("store", middle)
                frames.append((middle, end, slots - 1, False))
            else:
                is_kept = middle + 1 < end
                yield Action("record", middle, is_kept=is_kept)
                frames.append((middle + 1, end, slots - (self.internal_cost or 0) if is_kept else 0, True))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the tree of recomputations: what runs from where to where, in order.

        Args:
            ax: Axes to plot on; None makes new ones.

        Returns:
            The Axes. To the right go the steps, downwards goes time, in forward steps: a line is a run of steps, a
            circle a state that is stored, a square a step that is recorded, and it is filled if its graph waits for
            later steps.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        title = f"{self.steps:,} steps, {self.slots:,} slots: {self.forward_steps:,} forward steps"
        return plot_plan(self.actions(), self.steps, title, ax)

    def summary(self) -> str:
        """Return the plan's cost in one line."""
        memory = () if self.bytes is None else (f"memory={show_bytes(self.bytes)}",)
        costs = (f"forward_steps={self.forward_steps}", f"time={self.time_ratio:.2f}", *memory)
        return keyed("rmm_linear plan:", (f"steps={self.steps}", f"slots={self.slots}", *costs))

    def table(self) -> str:
        """Return the plan's costs.

        Returns:
            Text.
        """
        kinds = "states" if self.internal_cost is None else f"states, or graphs of {self.internal_cost} slots"
        forward, best = self.forward_steps, self.least_forward_steps
        bound = "" if best == forward else f" (no plan has less than {best:,})"
        rows = [
            ("steps", f"{self.steps:,}"),
            ("slots", f"{self.slots:,} for {kinds}; {self.slots_used:,} in use at most"),
            ("forward steps", f"{forward:,}{bound}, {forward / self.steps:.2f} per step"),
            ("time", f"{self.time_ratio:.2f} of a plain run"),
        ]
        if self.bytes is not None:
            rows.append(
                ("memory", f"{show_bytes(self.bytes)}: {self.slots_used:,} × {self.state_bytes:,} bytes, a graph")
            )
            if self.plain_bytes is not None:
                plain = self.steps * self.plain_bytes
                rows.append(("plain run", f"{show_bytes(plain)}, of which this is {100 * self.bytes / plain:.1f} %"))
        return table(("plan", ""), rows)

    def _records(self) -> list[dict[str, Any]]:
        return [action._asdict() for action in self.actions()]


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one step of a cell saves, as :func:`step_bytes` measures them.

    Attributes:
        state: Bytes of its state, with those of random generators and buffers if the step changes them.
        graph: Bytes that its backward pass needs, with the state that it reads, and the state and output it returns,
            and the same besides.
        plain: The same without the state that it reads, which in a plain loop the step before has returned.
    """

    state: int
    graph: int
    plain: int

    @property
    def slot(self) -> int:
        """Bytes of a slot where states and graphs are kept: a state's, or a 64th of a graph's if a state has less."""
        return max(self.state, math.ceil(self.graph / _FINEST), 1)

    @property
    def internal_cost(self) -> int:
        """Slots of a recorded step's graph: its bytes by those of a slot, rounded up."""
        return max(1, math.ceil(self.graph / self.slot))

    def plan(
        self,
        steps: int,
        *,
        memory: int | str | None = None,
        slots: int | None = None,
        internal: bool | Literal["only"] = True,
    ) -> BPTTPlan:
        """Make a plan for this cell.

        Args:
            steps: T.
            memory: Bytes, or a text such as "64MB", for stored states, and graphs with that of the step
                whose backward pass runs.
            slots: Number of states instead; with ``internal="only"``, of graphs.
            internal: Which of the paper's three policies: False stores states alone, "only" graphs of recorded steps
                alone, True either, whatever costs fewer steps.

        Returns:
            The plan.

        Raises:
            ValueError: If ``memory`` is too small, or ``internal`` none of the three.
        """
        if not isinstance(internal, bool) and internal != "only":
            raise ValueError(f'internal must be True, False or "only", got {internal!r}.')
        state = self.graph if internal == "only" else max(self.state, 1)
        if slots is None:
            if memory is None:
                raise ValueError("A plan needs memory or slots, got neither.")
            budget = read_bytes("memory", memory)
            if budget < self.graph:
                raise ValueError(
                    f"memory must be at least {self.graph:,} bytes, the graph of one recorded step, got {budget:,}. "
                    f"{self.graph + self.state:,} bytes store one state too; make the batch smaller to need less."
                )
            slots = (budget - self.graph) // state

        def using(count: int, cost: int | None, slot: int) -> BPTTPlan:
            return BPTTPlan(steps, count, cost, slot, self.graph or None, self.plain or None)

        if internal == "only" or not internal:
            return using(slots, 1 if internal else None, state)
        if self.slot == state:
            return using(slots, self.internal_cost, state)
        # Slots as small as the state would be too many to plan with. In larger ones states take more than they need.
        alone, room = using(slots, None, state), slots * state
        if room < self.graph:
            return alone
        both = using(room // self.slot, self.internal_cost, self.slot)
        return min(both, alone, key=lambda plan: plan.forward_steps)


def plan_bptt(steps: int, *, slots: int, internal_cost: int | None = None) -> BPTTPlan:
    """Plan backpropagation through time without running it.

    The forward steps are the least possible ones for states alone, for graphs alone (``internal_cost=1``, slots as
    large as a graph), and for both up to slots · steps² of 2·10⁹, which takes some seconds at first. Beyond that they
    are at most some per cent above the bound ``least_forward_steps``.

    Args:
        steps: T.
        slots: States that may be stored at once, the initial one not counted.
        internal_cost: Slots that the graph of a recorded step takes, such as 4 for an LSTM; None stores states alone.

    Returns:
        The plan.

    Example:
        >>> plan = plan_bptt(1000, slots=200, internal_cost=4)  # 5 % of the graphs of 1000 steps
        >>> plan.forward_steps, round(plan.time_ratio, 3)
        (1949, 1.316)

    Gruslys et al. 2016, *Memory-Efficient Backpropagation Through Time*, `arXiv:1606.03401
    <https://arxiv.org/abs/1606.03401>`_.
    """
    return BPTTPlan(steps, slots, internal_cost)


def plot_plan(actions: Iterable[Action], steps: int, title: str, ax: Axes | None = None) -> Axes:
    """Plot actions of ``BPTTPlan.actions()`` over so many steps; raises ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"Pictures need matplotlib. Run {INSTALL_EXTRA}.") from error
    ax = ax or Figure(figsize=(7, 4.5), layout="constrained").subplots()
    runs: list[tuple[float, float]] = []
    stored: list[tuple[float, float]] = []
    kept: list[tuple[float, float]] = []
    recorded: list[tuple[float, float]] = []
    clock = 0
    for action in actions:
        if action.kind == "advance":
            runs += [(action.step, clock), (action.end, clock + action.end - action.step), (float("nan"), float("nan"))]
            clock += action.end - action.step
        elif action.kind == "record":
            clock += 1
            (kept if action.is_kept else recorded).append((action.step + 0.5, clock - 0.5))
        elif action.kind == "store":
            stored.append((action.step, clock))
    size = max(1.0, min(5.0, 250 / steps))
    marks = {"linestyle": "", "markersize": size, "marker": "s"}
    for points, label, style in (
        (runs, "steps that run", {"color": "0.45", "linewidth": 0.8}),
        (stored, "state stored", {"linestyle": "", "marker": "o", "markersize": size, "color": "black"}),
        (kept, "step recorded, its graph saved", {**marks, "color": _RECORDED}),
        (recorded, "step recorded, its backward pass next", {**marks, "color": _NEXT, "markerfacecolor": "none"}),
    ):
        if points:
            ax.plot(*zip(*points, strict=True), label=label, **style)
    ax.set_xlabel("step")
    ax.set_ylabel("forward steps so far")
    ax.set_xlim(-0.5, steps + 0.5)
    ax.invert_yaxis()
    ax.legend(loc="upper right", fontsize=8)
    ax.set_title(title, fontsize=10)
    return ax
