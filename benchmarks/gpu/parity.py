"""All comparisons of the kernels with plain PyTorch, a few in a process: a crash on a device costs those alone."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import rmm_kernels_parity
from rmm_kernels_checks import poisoned_outputs

from benchmarks.processes import ProcessError, call
from benchmarks.records import Parity, origin, write_rows

logger = logging.getLogger("benchmarks")
_WORKERS = 12  # compiling kernels takes the time of the comparisons
_SHARE = 12  # comparisons that one process makes


def run_parity(path: Path, device: str, *, tiny: bool, timeout: float, commit: str) -> list[Parity]:
    """Make the comparisons and write their checks."""
    end = time.monotonic() + timeout
    titles = list(rmm_kernels_parity.comparisons())[:: 16 if tiny else 1]
    parts = [titles[start : start + _SHARE] for start in range(0, len(titles), _SHARE)]
    parts += [] if tiny else [[title] for title in rmm_kernels_parity.real_sizes()]

    def part(chosen: list[str]) -> list[Parity]:
        try:
            return call(compare, device, chosen, timeout=max(1.0, end - time.monotonic()))
        except ProcessError as error:
            logger.error("parity: %s", error)
            return [Parity(title, status=str(error).strip().splitlines()[-1]) for title in chosen]

    with ThreadPoolExecutor(_WORKERS if device == "cuda" else 2) as pool:
        rows = [row for found in pool.map(part, parts) for row in found]
    about = origin(device, commit)
    write_rows(path, [dataclasses.replace(row, **about) for row in rows])
    return rows


def compare(device: str, titles: Sequence[str]) -> list[Parity]:
    """Make comparisons; meant for a process of its own."""
    known = rmm_kernels_parity.comparisons() | rmm_kernels_parity.real_sizes()
    rows = []
    for title in titles:
        try:
            with poisoned_outputs():
                checks = known[title](device)
            rows += [Parity(title, c.what, c.error, c.limit, "ok" if c.ok else "failed") for c in checks]
        except Exception as error:
            rows.append(Parity(title, status=f"{type(error).__name__}: {error}".splitlines()[0]))
    return rows
