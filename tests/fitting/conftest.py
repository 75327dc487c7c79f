"""Settings of the tests of fit."""

from __future__ import annotations

import pytest

from rmm_linear.fitting import times


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of tests take microseconds, whose ratios say little however often they are timed."""
    monkeypatch.setattr(times, "_ROUNDS", 1)
    monkeypatch.setattr(times, "_MORE_ROUNDS", 0)
