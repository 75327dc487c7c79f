"""Fit a model that several processes train together: one plans, all apply its plan and check it by a step.

The process plans whose batch takes the most memory. Meanwhile the others wait for what it says: to check a plan, with
which each of them trains a step on its own batch, or how the fit ends. What one process finds reaches all, and so does
what it raises, so that none waits for one that has left.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import distributed, nn

from rmm_linear.fitting.report import FitReport, RankPeak
from rmm_linear.fitting.resident import Resident
from rmm_linear.planning.blocks.plan import BlockPlan
from rmm_linear.planning.budget import BudgetError
from rmm_linear.planning.step.sharded import is_sharded, silent

Found = TypeVar("Found")
_KINDS = {kind.__name__: kind for kind in (BudgetError, ValueError, TypeError, torch.OutOfMemoryError)}


@dataclass(frozen=True)
class _Failure:
    """What a process raised, as it is sent to the others."""

    rank: int
    kind: str
    text: str

    @property
    def error(self) -> Exception:
        """The error that the others raise; a budget that cannot be met is one of all processes."""
        if self.kind == BudgetError.__name__:
            return BudgetError(self.text)
        kind = _KINDS.get(self.kind)
        return (kind or RuntimeError)(f"On rank {self.rank}: {self.text if kind else f'{self.kind}: {self.text}'}")


class Processes:
    """Processes that train a model together."""

    def __init__(self, group: Any = None) -> None:
        """Take the processes of a group, or all."""
        self.group = group
        self.rank, self.count = distributed.get_rank(group), distributed.get_world_size(group)

    def gathered(self, one: Found) -> list[Found]:
        """Return what each process has, by rank."""
        found: list[Any] = [None] * self.count
        distributed.all_gather_object(found, one, group=self.group)
        return found

    def sent(self, one: Any, source: int) -> Any:
        place = source if self.group is None else distributed.get_global_rank(self.group, source)
        sent = [one if self.rank == source else None]
        distributed.broadcast_object_list(sent, place, group=self.group)
        return sent[0]

    def largest(self, one: int, device: torch.device) -> int:
        found = torch.tensor(one, device=device)
        distributed.all_reduce(found, distributed.ReduceOp.MAX, group=self.group)
        return int(found)

    def tried(self, run: Callable[[], Found]) -> list[Found] | Exception:
        """Run something that does not communicate in every process; return what all found, or what one raised."""
        own: Exception | None = None
        try:
            found: Any = run()
        except Exception as error:
            own, found = error, self.failure(error)
        everyone = self.gathered(found)
        failed = next((one for one in everyone if isinstance(one, _Failure)), None)
        return everyone if failed is None else own or failed.error

    def together(self, run: Callable[[], Found]) -> list[Found]:
        """Do the same, and raise in every process what one raised."""
        found = self.tried(run)
        if isinstance(found, Exception):
            raise found
        return found

    def failure(self, error: Exception) -> _Failure:
        """Return what the others get to know of an error."""
        return _Failure(self.rank, type(error).__name__, str(error))


def ranks_of(model: nn.Module) -> Processes | None:
    """Return the processes that train a model by DDP or ``fully_shard``; None for one that trains alone."""
    if not distributed.is_available() or not distributed.is_initialized() or not isinstance(model, nn.Module):
        return None
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
    if not wrapped and not is_sharded(model):
        return None
    ranks = Processes(model.process_group if wrapped else None)
    return ranks if ranks.count > 1 else None


class Member:
    """The part of one process in a fit of several."""

    def __init__(self, ranks: Processes, process: Resident, example: Any) -> None:
        """Begin with an exact model, and find out whose step takes the most."""
        self.ranks, self.process, self.example = ranks, process, example
        self.plan: BlockPlan | None = None
        # A model that is divided has other ranks take part in its real steps.
        self._alone: Callable[[], AbstractContextManager[Any]] = nullcontext if is_sharded(process.model) else silent
        exact = ranks.together(self._simulated)
        self.planner = exact.index(max(exact))  # the rank whose exact step takes the most, by its batch

    def fit(self, plan: Callable[[Callable[[BlockPlan], tuple[RankPeak, ...]]], FitReport]) -> FitReport:
        """Let one process plan, by ``plan(check)``; return its report in all."""
        if self.ranks.rank != self.planner:
            return self._followed()
        try:
            with self._alone():
                report = plan(self._asked)
        except Exception as error:
            self.ranks.sent(self.ranks.failure(error), self.planner)
            raise
        return self.ranks.sent(report, self.planner)

    def _asked(self, plan: BlockPlan) -> tuple[RankPeak, ...]:
        """Let all processes check a plan that is applied here."""
        self.ranks.sent(plan, self.ranks.rank)
        found = self._checked(plan)
        if isinstance(found, Exception):
            raise found
        if short := [str(one.rank) for one in found if one.measured is None]:
            raise torch.OutOfMemoryError(f"a step with the plan runs out of memory on rank {', '.join(short)}")
        return found

    def _followed(self) -> FitReport:
        """Do what the process that plans says until it is done."""
        own: Exception | None = None
        while True:
            said = self.ranks.sent(None, self.planner)
            if isinstance(said, BlockPlan):
                found = self._checked(said)
                own = found if isinstance(found, Exception) else None
            elif isinstance(said, _Failure):
                self._revert()
                raise own or said.error
            else:
                assert self.plan is not None  # noqa: S101 every plan that is reported was checked
                return replace(said, plan=self.plan)

    def _checked(self, plan: BlockPlan) -> tuple[RankPeak, ...] | Exception:
        """Apply a plan, and train a step with it on the own batch; return what all processes found."""

        def prepared() -> int:
            self._revert(plan)
            if not plan.is_applied:
                plan.apply(self.process.model)
            self.plan = plan
            return self._simulated()

        simulated = self.ranks.tried(prepared)
        if isinstance(simulated, Exception):
            return simulated
        if is_sharded(self.process.model):
            # Ranks communicate in it, so one that fails cannot tell the others: it ends, and its launcher ends them.
            measured: Any = self.ranks.gathered(self._measured())
        else:
            measured = self.ranks.tried(self._attempted)
        if isinstance(measured, Exception):
            return measured
        return tuple(RankPeak(rank, *both) for rank, both in enumerate(zip(simulated, measured, strict=True)))

    def _revert(self, other: BlockPlan | None = None) -> None:
        if self.plan is not None and self.plan is not other:
            self.plan.revert()
            self.plan = None

    def _simulated(self) -> int:
        with self._alone():
            return self.process.bytes + self.process.simulated(self.example).bytes

    def _measured(self) -> int:
        with self._alone():
            return self.process.bytes + self.process.measured(self.example)

    def _attempted(self) -> int | None:
        try:
            return self._measured()
        except torch.OutOfMemoryError:
            return None
