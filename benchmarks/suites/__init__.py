"""The suites by name, and the one ``setup(case, provider)`` that times, memory and the gate share.

A suite is a module with

- ``REFERENCE``, the provider whose time is 1;
- ``cases(device, tiny=...)``, its cases on "cpu" or "cuda", or small ones to try the command;
- ``providers(case)``, their titles, the reference first;
- ``setup(case, provider)``, which makes a provider ready to run on a case;
- ``THREADS``, the threads of the CPU that it always has; other suites have the process's.
"""

from __future__ import annotations

from types import ModuleType

from benchmarks.suites import bandwidth, host, linear, operators
from benchmarks.suites import blocks as block_steps
from benchmarks.suites.case import Case, Setup

SUITES: dict[str, ModuleType] = {
    "linear": linear,
    "kernels": bandwidth,
    "host": host,
    "operators": operators,
    "blocks": block_steps,
}


def setup(case: Case, provider: str) -> Setup:
    return SUITES[case.suite].setup(case, provider)
