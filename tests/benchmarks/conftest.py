"""Settings of the benchmarks' tests."""

from __future__ import annotations

import sys

import pytest
from frontier_helpers import places_in

import benchmarks  # noqa: F401  # the kernels' comparisons, which some files import before it, are found from here on


@pytest.fixture(autouse=True, scope="session")
def _only_where_triton_is() -> None:
    """On Linux the test extra has Triton, and a failing import of it is a failure."""
    if sys.platform != "linux":
        pytest.skip("Triton has no build for this platform")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A task and a model to compare methods on."""
    return places_in(tmp_path_factory.mktemp("frontier"))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods are compared in this process; processes of their own have tests of their own."""
    for module in ("cost", "runs", "study_steps"):
        monkeypatch.setattr(f"benchmarks.frontier.{module}.call", lambda run, *arguments, timeout=0.0: run(*arguments))
    monkeypatch.setattr("benchmarks.frontier.cost.give_back", lambda: None)  # it would slow all tests that follow
