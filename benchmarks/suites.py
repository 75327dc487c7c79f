"""The suites by name, and the one ``setup(case, provider)`` that times, memory and the gate share."""

from __future__ import annotations

from types import ModuleType

from benchmarks import bandwidth, linear, models
from benchmarks.case import Case, Setup

SUITES: dict[str, ModuleType] = {"linear": linear, "model": models, "kernels": bandwidth}


def setup(case: Case, provider: str) -> Setup:
    """Make a provider ready to run on a case.

    Args:
        case: One of its suite's ``cases(device, tiny=...)``.
        provider: One of its suite's ``providers(case)``.

    Returns:
        Its setup.
    """
    return SUITES[case.suite].setup(case, provider)
