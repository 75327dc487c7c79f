"""Times are taken in turns."""

from __future__ import annotations

import inspect
import statistics
import time

from benchmarks.timing import interleaved, quartiles


def test_providers_take_turns() -> None:
    turns: list[str] = []

    def run(name: str) -> None:
        turns.append(name)
        time.sleep(0.011)

    times = interleaved({name: lambda name=name: run(name) for name in "abc"}, "cpu", 3)
    assert "".join(name for name, before in zip(turns, ["", *turns], strict=False) if name != before) == "abcbabc"
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3, "c": 3}
    assert all(0.011 <= value < 0.1 for values in times.values() for value in values)


def test_quartiles_lie_within_the_values() -> None:
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    values = [5.0, 1.0, 2.0, 4.0, 3.0]
    assert quartiles(values) == (2.0, 3.0, 4.0)
    assert quartiles(values)[1] == statistics.median(values)


def test_do_bench_takes_what_it_is_given() -> None:
    from triton.testing import do_bench

    inspect.signature(do_bench).bind(print, warmup=10, rep=60, return_mode="all")
