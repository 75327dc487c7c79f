"""Times of options, by a clock that the test sets."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
from torch import nn

from rmm_linear.fitting import times
from rmm_linear.planning.blocks.plan import CONVERT, PlannedBlock

OPTION = PlannedBlock("block", CONVERT, setting="tenth")


def timed(monkeypatch: pytest.MonkeyPatch, converted: list[float]) -> tuple[dict[str, float], int]:
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

    monkeypatch.setattr(times, "_ROUNDS", 3)
    monkeypatch.setattr(times, "_MORE_ROUNDS", 4)
    monkeypatch.setattr(times.time, "perf_counter", lambda: now[0])
    found = times._rounds(nn.Linear(1, 1), SimpleNamespace(run=run), [OPTION], lambda _: SimpleNamespace(applied=apply))
    return found, len(converted) - len(list(rounds))


@pytest.mark.parametrize(
    ("rounds", "count"),
    [([0.9, 0.91, 0.92, 9.0, 9.0, 9.0, 9.0], 3), ([0.9, 1.8, 1.7, 0.9, 0.91, 0.92, 0.9, 5.0], 7)],
)
def test_rounds_that_disagree_are_followed_by_more(
    rounds: list[float], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, needed = timed(monkeypatch, rounds)
    assert found == {"": 1.0, OPTION.option: pytest.approx(0.91)}
    assert needed == count
