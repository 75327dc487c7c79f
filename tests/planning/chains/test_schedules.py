"""How many steps, states and transfers: the schedules' counts, and what a sweep really does."""

from __future__ import annotations

import functools
import math
import threading
import time
from typing import Any

import pytest
import torch
from planning_helpers import Recording, number_of
from torch import Tensor

from rmm_linear.memory import peak
from rmm_linear.planning import SweepReport, sweep
from rmm_linear.planning.chains import schedules
from rmm_linear.planning.stores import transfers as store_thread


@functools.cache
def fewest(steps: int, slots: int) -> int:
    """Revolve's recurrence: run to a step, store it, and take both parts."""
    if slots == 1:
        return steps * (steps - 1) // 2
    if steps <= 1:
        return 0
    return min(j + fewest(steps - j, slots - 1) + fewest(j, slots) for j in range(1, steps))


def test_the_closed_form_is_the_optimum_of_the_recurrence() -> None:
    pairs = [(steps, slots) for steps in range(1, 41) for slots in range(1, 9)]
    assert [schedules.recomputed(*pair) for pair in pairs] == [fewest(*pair) for pair in pairs]
    published = {(10, 3): 15, (20, 3): 45, (50, 5): 122, (100, 5): 316, (100, 10): 222}
    assert {pair: schedules.recomputed(*pair) for pair in published} == published


@pytest.mark.parametrize("steps", [2, 3, 10, 57, 200])
@pytest.mark.parametrize("slots", [1, 2, 6, 40])
def test_counts_of_the_schedules_are_those_of_the_closed_forms(steps: int, slots: int) -> None:
    alone = schedules.count(schedules.in_memory(steps, slots), steps)
    assert alone.forward_steps == steps + schedules.recomputed(steps, slots)
    assert alone.ram <= slots
    for interval in (1, 7, 50):
        two = schedules.count(schedules.two_level(interval, slots), steps)
        assert two.forward_steps == schedules.two_level_steps(steps, interval, slots)
        assert two.ram <= slots - 1  # and the one that an interval starts from
        assert two.writes == two.disk == -(-steps // interval)


@pytest.mark.parametrize("steps", [2, 3, 7, 20, 61])
@pytest.mark.parametrize("slots", [1, 2, 3, 6])
def test_states_in_fast_memory_are_a_stack_no_higher_than_the_slots(steps: int, slots: int) -> None:
    """So the last one that was stored is the first that is not needed any more."""
    made = schedules.package()
    chosen = [schedules.in_memory(steps, slots), *(schedules.two_level(interval, slots) for interval in (1, 4, 9))]
    chosen += [schedules.hierarchical(steps, slots, disk, cost, cost) for disk in (1, 3, 8) for cost in (0, 0.5, 3)]
    for schedule in chosen:
        stack: list[int] = []
        for action in schedule:
            if isinstance(action, made.EndReverse):
                break
            if isinstance(action, made.Forward):
                if action.write_ics and action.storage == made.StorageType.RAM:
                    stack = [*(number for number in stack if number != action.n0), action.n0]
                if schedule.max_n is None and action.n1 >= steps:
                    schedule.finalize(steps)
            elif isinstance(action, made.Reverse):
                stack = [number for number in stack if number < action.n0]
            assert stack == sorted(stack)
            assert len(stack) <= slots


def halve(number: int, u: Tensor) -> Tensor:
    return u * 0.5


def ran(steps: Any, **options: Any) -> SweepReport:
    report = SweepReport()
    sweep(halve, torch.ones(3, requires_grad=True), steps, **options, report=report).sum().backward()
    return report


@pytest.mark.parametrize("steps", [2, 10, 57])
def test_a_sweep_runs_as_often_as_its_schedule_says(steps: int) -> None:
    """One step more than none: the first one, whose graph shows the parameters, is not run again."""
    report = ran(steps, slots=4)
    assert report.forward_steps == steps + schedules.recomputed(steps, 4)
    assert (report.interval, report.stored) == (None, 0)
    report = ran(steps, slots=4, store=Recording(), interval=5)
    assert report.forward_steps == schedules.two_level_steps(steps, 5, 4)
    assert (report.interval, report.stored) == (5, (steps - 1) // 5)
    report = ran(steps, slots=4, store=Recording(), interval="sqrt")
    assert report.interval == math.isqrt(steps - 1) + 1
    assert report.forward_steps == schedules.two_level_steps(steps, report.interval, 4)
    report = ran(steps, store=Recording(), levels=[("ram", 3), ("disk", 4, 0.5, 0.5)])
    assert report.forward_steps == schedules.count(schedules.hierarchical(steps, 3, 4, 0.5, 0.5), steps).forward_steps


def test_each_state_is_written_once_read_once_and_dropped() -> None:
    store = Recording()
    report = ran(30, slots=2, store=store, interval=6)
    puts, gets = ([number for what, number in store.done if what == which] for which in ("put", "get"))
    assert puts == [6, 12, 18, 24]  # autograd has the first one
    assert gets == [18, 12, 6]  # the last one is in memory still
    assert (report.stored, report.read) == (4, 3)
    assert report.stored_bytes == sum(3 * 4 + torch.get_rng_state().numel() for _ in puts)
    assert store.held == {}


def test_the_interval_before_is_fetched_while_this_one_is_worked_on() -> None:
    """Each interval's steps wait until the get of the one before has begun, so that must not come after them."""
    begun = {number: threading.Event() for number in (8, 16, 24)}

    class Telling(Recording):
        def get(self, key: str) -> list[Tensor]:
            begun[number_of(key)].set()
            return super().get(key)

    backwards, waited = [False], set()

    def step(number: int, u: Tensor) -> Tensor:
        before = number // 8 * 8 - 8
        if backwards[0] and before in begun:
            assert begun[before].wait(20)
            waited.add(before)
        return u * 0.5

    report = SweepReport()
    u = torch.ones(3, requires_grad=True)
    final = sweep(step, u, 40, slots=2, store=Telling(), interval=8, report=report)
    backwards[0] = True
    final.sum().backward()
    assert waited == {8, 16, 24}
    assert report.read == 3


class Slow(Recording):
    """A store whose puts are slow."""

    def put(self, key: str, tensors: list[Tensor]) -> None:
        time.sleep(0.02)
        super().put(key, tensors)


def test_a_store_that_lags_makes_the_run_wait_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 19 puts goes on for 20 ms after the run began to wait for it, whatever else the processor does."""
    waits, wait = threading.Event(), store_thread.wait

    def watched(futures: Any, timeout: float) -> Any:
        waits.set()
        return wait(futures, timeout=timeout)

    class Lagging(Slow):
        def put(self, key: str, tensors: list[Tensor]) -> None:
            assert waits.wait(20)
            waits.clear()
            super().put(key, tensors)

    monkeypatch.setattr(store_thread, "wait", watched)
    report = ran(20, slots=2, store=Lagging(), interval=1)
    assert report.stored == 19
    assert report.waited > 17 * 0.02  # the run may ask again in the middle of a put, which lets the next one go on
    assert report.waited == report.waited_forward + report.waited_backward


def test_the_interval_is_that_of_the_measured_times() -> None:
    def step(number: int, u: Tensor) -> Tensor:
        time.sleep(0.004)
        return u * 0.5

    report = SweepReport()
    u = torch.ones(3, requires_grad=True)
    sweep(step, u, 60, slots=2, store=Slow(), report=report).sum().backward()
    assert report.step_seconds is not None
    assert report.transfer_seconds is not None
    assert report.interval == -int(-report.transfer_seconds // report.step_seconds)
    assert report.step_seconds >= 0.004
    assert report.transfer_seconds >= 0.02
    assert report.forward_steps == schedules.two_level_steps(60, report.interval, 2)


def test_no_store_where_it_costs_more_steps_than_it_saves() -> None:
    store = Slow()
    report = ran(12, slots=6, store=store)  # a transfer lasts thousands of these steps
    assert (report.interval, report.stored) == (None, 0)
    assert report.forward_steps == 12 + schedules.recomputed(12, 6)
    assert store.held == {}


SIZE = 1 << 16  # elements of a state


@pytest.mark.parametrize(
    ("options", "states"),
    [
        ({"slots": 1}, 1),
        ({"slots": 5}, 5),
        ({"slots": 5, "interval": 20}, 5),
        ({"slots": 1, "interval": 4}, 1),
        ({"slots": 4, "interval": "sqrt"}, 4),
        ({"slots": 100}, 100),  # more than the limits above
    ],
    ids=str,
)
def test_no_more_states_live_than_there_are_slots(options: dict[str, Any], states: int, tmp_path: Any) -> None:
    """In addition: the final state, its gradient; a step's result, derivative, two gradients; on the thread, two."""
    u = torch.ones(SIZE, requires_grad=True)
    store = {"store": tmp_path} if "interval" in options else {}
    with peak("cpu") as measured:
        final = sweep(lambda i, u: torch.sin(u), u, 100, **options, **store)
        final.backward(torch.ones(SIZE))
    others = 6 + 2 * bool(store)
    assert states - 1 <= measured.bytes / (4 * SIZE) <= states + others
