"""Reports of sweeps, used more than once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planning_helpers import differences, differentiated, plain

from rmm_linear.planning import SweepReport, sweep
from rmm_linear.planning.chains import schedules


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_a_report_that_was_used_before_changes_nothing(steps: int, tmp_path: Any) -> None:
    """What it has from another sweep is no measurement of this one."""
    old = {"steps": 9, "forward_steps": 9, "interval": 3, "stored": 3, "read": 3, "waited_forward": 1.0}
    report = SweepReport(**old, step_seconds=1.0, transfer_seconds=1.0)
    options = {"slots": 3, "store": tmp_path, "report": report}
    expected = differentiated(lambda step, state: plain(step, state, steps))
    found = differentiated(lambda step, state: sweep(step, state, lambda i, _: i < steps, **options))
    assert differences(found, expected) == []
    if steps < 4:  # over before a transfer was measured
        assert report == SweepReport(steps=steps, forward_steps=report.forward_steps)


def test_a_report_of_a_sweep_without_a_store_has_nothing_of_one_before() -> None:
    report, u = SweepReport(), torch.ones(3, requires_grad=True)
    sweep(lambda i, u: u * 0.5, u, 20, slots=2, store="cpu", interval=3, report=report).sum().backward()
    assert report.stored == 6
    sweep(lambda i, u: u * 0.5, u, 6, slots=2, report=report).sum().backward()
    assert report == SweepReport(steps=6, forward_steps=6 + schedules.recomputed(6, 2))
    sweep(lambda i, u: u * 0.5, u, 0, slots=2, report=report)
    assert report == SweepReport()
