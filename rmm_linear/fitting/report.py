"""Report a fit: the budget, the peak, what every kind of block does, and its cost in time and noise."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rmm_linear._support.files import write_text
from rmm_linear._support.reports import Report
from rmm_linear._support.sizes import show_both, show_bytes
from rmm_linear._support.tables import keyed, table, wrapped
from rmm_linear.fitting.static_memory import StaticMemory
from rmm_linear.memory.peak import Peak
from rmm_linear.planning.blocks.plan import BlockPlan, label_of
from rmm_linear.planning.step.plots import plot_memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FEW_RANKS = 8  # that are all shown


@dataclass(frozen=True)
class RankPeak:
    """The peak of one process of several that train a model together, on its own batch."""

    rank: int  # of the process
    simulated: int  # bytes of a step with the plan, and of what is there before it
    measured: int | None  # the same of a real step; None if it ran out of memory

    @property
    def bytes(self) -> int:
        """The measured peak, or the simulated one."""
        return self.simulated if self.measured is None else self.measured


@dataclass(repr=False)
class FitReport(Report):
    """The result of :func:`rmm_linear.fit`.

    All peaks are bytes of a whole training process on one device: parameters, buffers, the optimizer's state and DDP's
    buckets, and on top of them what a step makes: gradients, saved activations, temporary results.

    Attributes:
        plan: The choice for every block; the model trains by it.
        memory: The budget in bytes; None where time alone was bounded.
        static: Bytes that a training process needs in addition to its steps.
        exact_peak: Without a plan, simulated.
        predicted_peak: By the sum that was solved.
        simulated_peak: Of a step with the plan, followed tensor by tensor.
        measured_peak: Of a real step with the plan; None where the model has no values.
        time: Time of a step relative to the exact step, measured block by block; None where nothing could be timed.
        noise: Variance ratio of the whole gradient: the variance that compression adds, divided by that of the
            minibatch, D²_SGD. None if unknown. ``max_noise`` limits the ratio of single layers, which is larger.
        notes: Options left out and measurements that failed, with the reason.
        before: Memory over an exact step.
        after: Memory over a step with the plan.
        binds: What kept the plan from costing less: the device's memory, the host's, or the link between them; "" for
            the exact model.
        host_memory: The limit of what waits on the host, in bytes; None is none.
        ranks: Of every process, where several train a model together: its ``rank``, and the ``simulated`` and
            ``measured`` bytes of its peak. The other figures are those of the one that planned, whose batch takes the
            most memory; the measured peak is the highest of all.
    """

    plan: BlockPlan
    memory: int | None
    static: StaticMemory
    exact_peak: int
    predicted_peak: int
    simulated_peak: int
    measured_peak: int | None = None
    time: float | None = None
    noise: float | None = None
    notes: list[str] = field(default_factory=list)
    before: Peak = field(default_factory=Peak)
    after: Peak = field(default_factory=Peak)
    binds: str = ""
    host_memory: int | None = None
    ranks: tuple[RankPeak, ...] = ()

    @property
    def binding_rank(self) -> RankPeak | None:
        """The process with the highest peak; None where one process trains alone."""
        return max(self.ranks, key=lambda one: one.bytes, default=None)

    @property
    def host(self) -> int:
        """Bytes that wait in host memory, or in files, and what is there before a step."""
        return self.plan.host + self.static.host

    @property
    def peak(self) -> int:
        """The peak of a step, measured or else simulated; or what the optimizer's step takes, if that is more."""
        step = self.simulated_peak if self.measured_peak is None else self.measured_peak
        return max(step, self.static.in_optimizer_step)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.memory is None or self.peak <= self.memory

    @property
    def is_exact(self) -> bool:
        """Whether no block is changed."""
        return all(block.choice == "keep" for block in self.plan.blocks)

    def summary(self) -> str:
        """Return the report in one line, or two of 100 columns."""
        counts: dict[str, int] = {}
        for block in self.plan.blocks:
            key = label_of(block.option).replace(" + ", "+").replace(", ", ":").replace(" ", "_")
            counts[key] = counts.get(key, 0) + 1
        parts = [f"peak={show_bytes(self.peak)}", f"exact={show_bytes(self.exact_peak)}"]
        parts += [] if self.memory is None else [f"budget={show_both(self.memory)}"]
        parts += [f"host={show_bytes(self.host)}"] if self.host else []
        parts += [] if self.time is None else [f"time={self.time:.3f}"]
        parts += [] if self.noise is None else [f"variance_ratio={self.noise:.3g}"]
        return keyed("rmm_linear fit:", [*parts, *(f"{option}={count}" for option, count in counts.items())])

    def _text(self, *, is_whole: bool) -> str:
        blocks = self.plan.block_table(is_whole=is_whole, has_noise=self.noise is not None)
        said = list[str]()
        if self.is_exact:
            said.append(
                "The exact model fits the budget: no block is changed, no memory is won. revert() before another fit."
            )
        said += [f"The peak is in the {self.after.moment}."] if self.after.moment else []
        said += [f"What binds is {self.binds}."] if self.binds else []
        if self.noise:
            said.append(
                "Variance ratio: variance added to the whole gradient / its minibatch variance. max_noise limits the "
                "ratio of every single layer instead, which is larger."
            )
        said += [f"Note: {note}" for note in self.notes]
        lines = "\n".join(wrapped(line, 2) for line in said)
        parts = [self.summary(), self._peaks(), self._ranks(is_whole=is_whole), blocks, lines]
        return "\n\n".join(filter(None, parts))

    def _records(self) -> list[dict[str, Any]]:
        return self.plan._records()

    def _peaks(self) -> str:
        by = self.simulated_peak if self.measured_peak is None else self.measured_peak
        rows = [("exact, simulated", show_bytes(self.exact_peak), "")]
        for label, size in (("predicted", self.predicted_peak), ("simulated", self.simulated_peak)):
            rows.append((label, show_bytes(size), _error(size, by)))
        if self.measured_peak is not None:
            rows.append(("measured", show_bytes(self.measured_peak), ""))
        static = [(f"of which {name}", show_bytes(size), "") for name, size in self.static.to_dict().items() if size]
        return table(("peak", "bytes", "error"), [*rows, *static])

    def _ranks(self, *, is_whole: bool) -> str:
        """Return the peaks of the processes; in short, the highest and the lowest."""
        order = sorted(self.ranks, key=lambda one: -one.bytes)
        order = order if is_whole or len(order) <= _FEW_RANKS else [order[0], order[-1]]
        rows = [
            (
                f"{one.rank} of {len(self.ranks)}{', binds' if one is self.binding_rank else ''}",
                show_bytes(one.simulated),
                show_bytes(one.bytes),
                _error(one.simulated, one.bytes),
            )
            for one in order
        ]
        return table(("rank", "simulated", "measured", "error"), rows) if rows else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON types.

        Returns:
            Its figures, the plan, and memory over an exact step and over one with the plan.
        """
        names = ("memory", "exact_peak", "predicted_peak", "simulated_peak", "measured_peak", "time", "noise")
        names += ("host", "binds")
        return {
            **{name: getattr(self, name) for name in names},
            "static": self.static.to_dict(),
            "ranks": [asdict(one) for one in self.ranks],
            "moment": self.after.moment,
            "notes": list(self.notes),
            "plan": self.plan.to_dict(),
            "timeline": {
                name: [[size, moment] for size, moment in peak.timeline]
                for name, peak in (("before", self.before), ("after", self.after))
            },
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report.

        Args:
            path: A JSON file. ``report.plan.save(path)`` writes what :func:`rmm_linear.planning.load_plan` reads.
        """
        write_text(path, json.dumps(self.to_dict()) + "\n")

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot memory over one step, exact and with the plan, without what is there before a step.

        Args:
            ax: Axes to plot on; None makes new ones.

        Returns:
            The Axes.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        return plot_memory({"exact": self.before, "fitted": self.after}, ax)


def _error(size: int, by: int) -> str:
    return f"{100 * (size / by - 1):+.2f} %" if by else ""
