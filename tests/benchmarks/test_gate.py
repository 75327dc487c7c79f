"""The correctness gate: what is right passes, what is wrong is recorded with its reason and not timed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.suites import SUITES, bandwidth, gate, host, linear, operators, setup
from benchmarks.suites import blocks as block_steps
from benchmarks.suites.case import Case, Outcome, Setup
from benchmarks.suites.runner import run_cases

LINEAR = linear.cases("cpu", tiny=True)[0]
OPERATORS = operators.cases("cpu", tiny=True)
EVERY = [
    *(case for suite in (linear, bandwidth, host) for case in suite.cases("cpu", tiny=True)[:1]),
    *(case for suite in (operators, block_steps) for case in suite.cases("cpu", tiny=True)),
]
WIDE = dataclasses.replace(LINEAR, sizes=(512, 768, 768))


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_the_gate_lets_every_provider_through(case: Case) -> None:
    for provider in SUITES[case.suite].providers(case):
        assert gate.failure(setup(case, provider), case.torch_dtype) == ""


def changed(case: Case, provider: str, change) -> Setup:
    right = setup(case, provider)
    return dataclasses.replace(right, outcome=lambda seed: change(right.outcome(seed)))


def exact_off(name: str):
    def change(found: Outcome) -> Outcome:
        return dataclasses.replace(found, exact={**found.exact, name: found.exact[name] * 1.001})

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (exact_off("output"), "output is off by"),
        (exact_off("dX"), "dX is off by"),
        (exact_off("db"), "db is off by"),
        (lambda found: Outcome(found.exact, [found.random[0] * 0.5]), "mean of the estimate is off by -"),
        (lambda found: Outcome(found.exact, [found.random[0] * float("nan")]), "mean of the estimate is off by"),
        (lambda found: Outcome({}, found.random), "where output, dX, db is expected"),
    ],
)
def test_the_gate_stops_a_wrong_provider(change, reason: str) -> None:
    assert reason in gate.failure(changed(WIDE, "countsketch", change), torch.float32)


@pytest.mark.parametrize("case", OPERATORS, ids=lambda case: case.name)
@pytest.mark.parametrize("provider", [operators.PACKED, operators.PACK, operators.APPLY])
def test_the_gate_runs_what_is_timed(case: Case, provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a provider calls is made wrong: the clock runs it, and the gate stops it."""
    one, calls = operators._operation(case), []
    whole = "pack" if one.forward is None else "forward"
    name = {operators.PACKED: whole, operators.PACK: "pack", operators.APPLY: "apply"}[provider]

    def wrong(*arguments):
        calls.append(arguments)
        made = getattr(one, name)(*arguments)
        if name == "forward":
            return 1.1 * made[0], made[1]
        return torch.zeros_like(made) if name == "pack" else [2 * gradient for gradient in made]

    broken = dataclasses.replace(one, **{name: wrong})
    monkeypatch.setattr(operators, "_operation", lambda case: broken)
    found = setup(case, provider)
    begin = len(calls)
    assert gate.failure(found, case.torch_dtype) != ""
    judged = len(calls)
    found.run()
    assert begin < judged < len(calls)


def test_a_projection_of_many_elements_is_not_off_by_rounding() -> None:
    ones = torch.full((1 << 24,), 1.1)
    assert gate.projection([ones], [ones]) == pytest.approx(1, abs=1e-6)


def test_what_fails_is_recorded_and_not_timed() -> None:
    timed: list[str] = []

    def make(case: Case, provider: str) -> Setup:
        if provider == "paper":
            raise MemoryError("no memory for S")
        right = setup(case, provider)
        wrong = changed(case, provider, exact_off("output")).outcome
        run = right.run
        right = dataclasses.replace(right, run=lambda: (timed.append(provider), run()))
        return dataclasses.replace(right, outcome=wrong) if provider == "rows" else right

    (rows,) = run_cases([LINEAR], make=make, memory=lambda case: False)
    status = {row.provider: row.status for row in rows}
    assert status["paper"] == "MemoryError: no memory for S"
    assert status["rows"].startswith("output is off by")
    assert status["countsketch"] == "ok"
    assert set(timed) == {row.provider for row in rows if row.status == "ok"}
    assert all((row.median is None) == (row.relative is None) == (row.status != "ok") for row in rows)
