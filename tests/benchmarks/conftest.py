"""Settings of the benchmarks' tests."""

from __future__ import annotations

import sys

import pytest

import benchmarks  # noqa: F401  # the kernels' comparisons, which some files import before it, are found from here on


@pytest.fixture(autouse=True, scope="session")
def _only_where_triton_is() -> None:
    """On Linux the test extra has Triton, and a failing import of it is a failure."""
    if sys.platform != "linux":
        pytest.skip("Triton has no build for this platform")
