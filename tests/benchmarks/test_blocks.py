"""The command that measures whole blocks, on small models."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.blocks import BlockRow, main
from benchmarks.left import LeftRow
from benchmarks.peaks import PeakRow
from benchmarks.records import read_rows
from rmm_linear.config import OPERATIONS


def run(what: str, out: Path) -> list:
    assert main([what, "--tiny", "--rounds", "1", "--draws", "2", "--out", str(out)]) == 0
    return read_rows(out / f"blocks-{what}.csv", {"left": LeftRow, "peaks": PeakRow}.get(what, BlockRow))


def test_bytes_fall_with_every_operation(tmp_path: Path) -> None:
    rows = run("bytes", tmp_path)
    cases = {(row.case, row.dtype) for row in rows}
    assert len(cases) == 2
    for case in cases:
        of_case = [row.value for row in rows if (row.case, row.dtype) == case]
        exact, *first, others = of_case
        assert len(first) == len(OPERATIONS)
        assert first == sorted(first, reverse=True)
        assert 0 < first[-1] < min(exact, others)


def test_noise_is_shown_by_operation(tmp_path: Path) -> None:
    rows = run("noise", tmp_path)
    assert {row.case for row in rows} == {"roberta, 2 layers", "llama, 2 layers"}
    assert all(row.median is not None and row.first is not None for row in rows)


def test_steps_are_timed_beside_the_exact_one(tmp_path: Path) -> None:
    rows = run("steps", tmp_path)
    assert [row.operations for row in rows] == ["exact", "linear", " ".join(OPERATIONS)]
    assert all(row.relative == 1 for row in rows if row.operations == "exact")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from /proc")
def test_peaks_stand_beside_what_is_saved(tmp_path: Path) -> None:
    rows = run("peaks", tmp_path)
    assert len(rows) == 3
    for row in rows:
        assert row.live > row.saved > 0
        assert row.rss is not None
        assert (row.live_fall is None) == (row.operations == "exact")
