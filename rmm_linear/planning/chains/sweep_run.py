"""Runs a schedule on a chain of steps: its actions until the forward pass ends, and the rest in the backward pass."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from rmm_linear.planning.chains.schedules import package
from rmm_linear.planning.chains.sweep_settings import SweepReport
from rmm_linear.planning.chains.sweep_steps import RecordedStep, Stepper, go_back, reached
from rmm_linear.planning.replay.replayed import Replayed
from rmm_linear.planning.replay.snapshots import Snapshot
from rmm_linear.planning.stores.transfers import Transfers

Gradients = list[Tensor | None]


class Length:
    """The number of steps: known, or found out by asking before every step."""

    def __init__(self, steps: int | Callable[[int, Any], Any], structure: TreeSpec) -> None:
        self._condition = steps if not isinstance(steps, int) else None
        self.known = steps if isinstance(steps, int) else None
        self._structure, self._asked = structure, -1

    def has(self, number: int, leaves: Sequence[Tensor]) -> bool:
        """Say whether there is a step; the condition is asked once for each."""
        if self.known is not None:
            return number < self.known
        if number > self._asked and self._condition is not None:
            with torch.no_grad():
                if not self._condition(number, tree_unflatten(list(leaves), self._structure)):
                    self.known = number
                    return False
            self._asked = number
        return True


class SweepRun:
    """One sweep between its start and the end of its backward pass."""

    def __init__(
        self,
        stepper: Stepper,
        schedule: Any,
        length: Length,
        early: dict[int, Snapshot],
        replayed: Replayed,
        parameters: Sequence[Tensor],
        transfers: Transfers | None,
        report: SweepReport,
    ) -> None:
        """Run nothing yet. ``early`` are the states before the first steps, computed to learn about them."""
        self._stepper, self._schedule, self._length = stepper, schedule, length
        self._replayed, self._transfers, self._report = replayed, transfers, report
        # Not the saved ones: hooks of saved tensors may give others back, which no step reaches.
        self._parameters = parameters
        self._known = {id(parameter) for parameter in parameters}
        self._early, self._begin = early, early[0]
        self._work, self._seen = early[0].leaves, early[0].seen  # None: what is there now
        self._ram: dict[int, Snapshot] = {}
        self._stored: dict[int, Snapshot] = {}  # without tensors
        self._current: tuple[int, Snapshot] | None = None  # the stored state that was last in use
        self._recorded: RecordedStep | None = None
        self._last = early[0].seen  # of the newest snapshot: its copies serve the next one where nothing has changed
        self._ended = False

    def forward(self, needed: list[bool]) -> list[Tensor]:
        self._needed = needed
        made = package()
        try:
            with self._replayed.autocast():
                for action in self._schedule:
                    if isinstance(action, made.EndForward):
                        break
                    self._forward(action)
        except BaseException:
            self.close()
            raise
        self._early = {}
        if self._begin.seen is not None:
            self._replayed.settle(self._begin.seen, self._last)
        self._begin = dataclasses.replace(
            self._begin, leaves=[], versions=None
        )  # autograd keeps them, until the backward pass
        self._report.steps = self._length.known or 0
        self._tell("forward")
        return [leaf.detach() for leaf in self._work]

    def backward(self, initial: Sequence[Tensor], gradients: Gradients) -> tuple[Gradients, Gradients]:
        """Run the chain backwards, from the gradients with respect to the tensors of the final state."""
        if self._ended:
            raise RuntimeError(
                "A sweep must go backwards once, got a second backward pass, but the states that it needs are gone "
                "after the first. Sum what you differentiate, or call sweep again."
            )
        self._replayed.check()
        made = package()
        totals: Gradients = [None] * len(self._parameters)
        self._begin = dataclasses.replace(self._begin, leaves=[leaf.detach() for leaf in initial])
        try:
            with self._replayed.autocast(), self._replayed.kept():
                if self._begin.seen is not None:
                    self._replayed.set(self._begin.seen, whole=True)
                for action in self._schedule:
                    if isinstance(action, made.EndReverse):
                        break
                    if isinstance(action, made.Forward):
                        self._forward(action)
                    elif isinstance(action, made.Reverse):
                        gradients, totals = self._reverse(action, gradients, totals)
                    else:
                        self._fetch(action.n, stored=action.from_storage == made.StorageType.DISK)
        finally:
            self._tell("backward")
            self.close()
        return gradients, totals

    def close(self) -> None:
        """Give up all states, those in the store too."""
        self._ended = True
        self._ram, self._current, self._recorded, self._early, self._work, self._last = {}, None, None, {}, [], None
        self._begin = dataclasses.replace(self._begin, leaves=[], versions=None, seen=None)
        if self._transfers is not None:
            self._transfers.close()

    def _forward(self, action: Any) -> None:
        for number in range(action.n0, action.n1):
            if not self._length.has(number, self._work):
                break
            if number == action.n0 and action.write_ics:
                self._keep(number, action.storage)
            if action.write_adj_deps:
                self._record(number)
            elif number + 1 in self._early:
                snapshot = self._early.pop(number + 1)
                self._work, self._seen = snapshot.restored(), snapshot.seen
            else:
                self._work, self._seen = self._stepper.advance(number, self._work), None
        known = self._length.known
        if self._schedule.max_n is None and known is not None and action.n1 >= known:
            self._schedule.finalize(known)

    def _record(self, number: int) -> None:
        again = self._early.pop(number + 1, None)  # it has run before
        with contextlib.ExitStack() as stack:
            if again is not None and self._seen is not None:
                stack.enter_context(self._replayed.again(self._seen))
            self._recorded = self._stepper.record(number, self._work, None if number else self._needed)
        if any(id(leaf) not in self._known for leaf in reached(self._recorded)):
            raise RuntimeError(
                f"step must reach the same parameters every time, but step {number} reaches one that step 0 does not. "
                "Make step an nn.Module that has all of them (or a method of one)."
            )
        self._work = [leaf.detach() for leaf in self._recorded.outputs]
        self._seen = None if again is None else again.seen

    def _reverse(self, action: Any, gradients: Gradients, totals: Gradients) -> tuple[Gradients, Gradients]:
        if self._recorded is None or action.n1 != action.n0 + 1:
            raise RuntimeError(f"A schedule must record every step before it reverses it, got {action}.")
        recorded, self._recorded = self._recorded, None
        with self._replayed.as_left():
            found = go_back(recorded, gradients, self._parameters, totals)
        # Nothing from this step on is asked for again; not every schedule says so. The last one kept is the highest.
        while self._ram and next(reversed(self._ram)) >= action.n0:
            self._ram.popitem()
        if self._transfers is not None:
            self._transfers.drop_from(action.n0)
        return found

    def _keep(self, number: int, storage: Any) -> None:
        if number == 0:
            return  # autograd has it
        seen = self._seen or self._replayed.seen(self._last)
        snapshot, self._last = Snapshot.of(number, self._work, seen), seen
        if storage == package().StorageType.RAM or self._transfers is None:
            self._ram[number] = snapshot
            return
        self._transfers.put(number, snapshot.tensors)
        self._stored[number] = snapshot.without_tensors()
        self._current = number, snapshot

    def _fetch(self, number: int, *, stored: bool) -> None:
        if number == 0:
            snapshot = self._begin
        elif not stored or self._transfers is None:
            snapshot = self._ram[number]
        else:
            if self._current is None or self._current[0] != number:
                self._current = None  # its memory is free before the next one comes
                self._current = number, self._stored[number].with_tensors(self._transfers.get(number))
            snapshot = self._current[1]
            self._transfers.prefetch(number)
        self._work, self._seen = snapshot.restored(), None
        if snapshot.seen is not None:
            self._replayed.set(snapshot.seen)

    def _tell(self, which: str) -> None:
        report, transfers = self._report, self._transfers
        report.forward_steps = self._stepper.count
        if transfers is not None:
            report.stored, report.stored_bytes, report.read = transfers.count, transfers.bytes, transfers.reads
            if which == "forward":
                report.waited_forward = transfers.waited
            else:
                report.waited_backward = transfers.waited - report.waited_forward
