"""Times of options, by a clock that the test sets."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rmm_linear.fitting import times
from rmm_linear.fitting.times import Seconds
from rmm_linear.planning.blocks.plan import CONVERT, RECOMPUTE, PlannedBlock

OPTION = PlannedBlock("block", CONVERT, setting="tenth")


def timed(
    monkeypatch: pytest.MonkeyPatch, converted: list[float], few: tuple[int, int] = (3, 4)
) -> tuple[dict[str, Seconds], int]:
    """Seconds of an option whose rounds take ``converted`` where the exact block takes one; and how many there were."""
    now, applied = [0.0], [False]
    rounds = iter(converted)
    seconds = [1.0]

    @contextlib.contextmanager
    def apply():
        applied[0], seconds[0] = True, next(rounds)
        yield
        applied[0] = False

    def run() -> None:
        now[0] += seconds[0] if applied[0] else 1.0

    monkeypatch.setattr(times, "REPEATS", 10)
    monkeypatch.setattr(times.time, "perf_counter", lambda: now[0])
    planned = SimpleNamespace(applied=apply)
    found = times._rounds(nn.Linear(1, 1), SimpleNamespace(run=run), [OPTION], lambda _: planned, *few)
    return found, len(converted) - len(list(rounds))


@pytest.mark.parametrize(
    ("rounds", "count"),
    [([0.9, 0.91, 0.92, 9.0, 9.0, 9.0, 9.0], 3), ([0.9, 1.8, 1.7, 0.9, 0.91, 0.92, 0.9, 5.0], 7)],
)
def test_rounds_that_disagree_are_followed_by_more(
    rounds: list[float], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, needed = timed(monkeypatch, rounds)
    assert found == {"": (1.0, 1.0), OPTION.option: pytest.approx((0.91, 0.91))}
    assert needed == count
    assert timed(monkeypatch, rounds, (1, 0)) == ({"": (1.0, 1.0), OPTION.option: pytest.approx((0.9, 0.9))}, 1)


class Cuda:
    """A host that issues work and a device that does it in order, each by its own clock."""

    def __init__(self, host: float, device: float) -> None:
        self.now = self.busy_until = 0.0
        self.host, self.seconds, self.begin, self.waits = host, device, 0.0, 0

    def run(self) -> None:
        self.now += self.host
        self._does(self.seconds)

    def _does(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.now) + seconds

    def synchronize(self, device: torch.device) -> None:
        self.now = max(self.now, self.busy_until)
        self.waits += 1

    def _sleep(self, cycles: int) -> None:
        self._does(cycles / 1.7e9)

    def device(self, device: torch.device) -> contextlib.nullcontext:
        return contextlib.nullcontext()

    def Event(self, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace()
        event.record = lambda: setattr(event, "at", max(self.busy_until, self.now))
        event.elapsed_time = lambda end: (end.at - event.at) * 1000
        return event


@pytest.mark.parametrize(("host", "device"), [(1.0, 3.0), (3.0, 1.0)])
def test_on_cuda_a_queue_tells_the_time_of_the_host_from_that_of_the_device(
    host: float, device: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda(host, device)
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch, "get_device_module", lambda device: cuda)
    monkeypatch.setattr(times.time, "perf_counter", lambda: cuda.now)
    there = torch.device("cuda")
    single = times._once(SimpleNamespace(run=cuda.run), there)
    assert single == host + device
    cuda.waits = 0
    assert times._queued(SimpleNamespace(run=cuda.run), there, 10, hold=10 * single) == pytest.approx((host, device))
    assert cuda.waits == 3  # before, between and after the queues, not for each call


@pytest.mark.parametrize(
    ("plain", "converted", "expected"),
    [
        # The device binds both steps: what the host does in addition is hidden.
        ((1.0, 10.0), (5.0, 8.0), -2.0),
        # The host binds the converted step alone: four blocks take 4 · 5 in place of 4 · 3.
        ((1.0, 3.0), (5.0, 2.0), 2.0),
        # The host binds both.
        ((2.0, 1.0), (5.0, 4.0), 3.0),
    ],
)
def test_the_longer_of_host_and_device_counts_over_the_whole_step(
    plain: tuple[float, float],
    converted: tuple[float, float],
    expected: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    recomputed = PlannedBlock("block", RECOMPUTE)
    found = {"": Seconds(*plain), OPTION.option: Seconds(*converted), recomputed.option: Seconds(0.9, 0.9)}
    monkeypatch.setattr(times, "_rounds", lambda *arguments: dict(found))
    names = [name for name, _ in model.named_children()]
    given = times.time_options(
        model, torch.ones(1, 2), {name: [OPTION, recomputed] for name in names}, lambda row: None
    )
    assert given.plain == dict.fromkeys(names, max(plain))
    assert [given.extra[name, OPTION.option] for name in names] == pytest.approx([expected] * 4)
    assert sum(given.extra[name, OPTION.option] for name in names) == 4 * (max(converted) - max(plain))
    assert all(given.extra[name, recomputed.option] == 0 for name in names)  # which cannot be faster


def test_blocks_that_the_host_binds_may_hide_behind_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding whose host time is the longer, and a head whose device time is: the sums count."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    seconds = iter([Seconds(3.0, 1.0), Seconds(1.0, 5.0)])
    monkeypatch.setattr(times, "_rounds", lambda *arguments: {"": next(seconds)})
    given = times.time_options(model, torch.ones(1, 2), {"0": [], "1": []}, lambda row: None)
    assert given.plain == {"0": 1.0, "1": 5.0}
