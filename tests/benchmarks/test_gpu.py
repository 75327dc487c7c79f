"""``python -m benchmarks gpu``: what fails costs nothing else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks import gpu, parity
from benchmarks.processes import ProcessError
from benchmarks.records import Parity, read_rows
from benchmarks.suites import SUITES


def test_memory_is_that_of_what_keeps_something() -> None:
    found = {case for name in SUITES for case in SUITES[name].cases("cuda", tiny=False) if gpu.measures_memory(case)}
    assert {case.suite for case in found} == {"linear", "model", "blocks"}
    assert {case.name for case in found if case.suite == "linear"} == {"16384 x 4096 -> 4096"}


def test_the_comparisons_share_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts = []

    def slow(function, *arguments, timeout):
        timeouts.append(timeout)
        time.sleep(0.2)
        return []

    monkeypatch.setattr(parity.rmm_kernels_parity, "comparisons", lambda: dict.fromkeys(map(str, range(16 * 12 * 5))))
    monkeypatch.setattr(parity, "call", slow)
    monkeypatch.setattr(parity, "write_rows", lambda path, rows: None)
    parity.run_parity(tmp_path / "parity.csv", "cpu", tiny=True, timeout=3.0, commit="abc")
    assert len(timeouts) == 5  # two at a time
    assert timeouts[0] <= 3
    assert timeouts[-1] <= timeouts[0] - 0.3  # two more have taken 0.2 each before it


def test_a_failing_section_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def crash(function, *arguments, timeout):
        if arguments[0] == "linear":
            raise ProcessError("suite_section ended its process with status -6")
        return ["16 x 4, rows, float32, 0.1: output is off"] if arguments[0] == "model" else []

    monkeypatch.setattr(gpu, "call", crash)
    for section in ("run_parity", "run_largest"):
        monkeypatch.setattr(gpu, section, lambda *arguments, **options: [])
    assert gpu.gpu(tmp_path, device="cpu", tiny=True) == 1
    expected = "linear: suite_section ended its process with status -6\n16 x 4, rows, float32, 0.1: output is off\n"
    assert (tmp_path / "failures-cpu.txt").read_text() == expected
    out = capsys.readouterr().out
    assert all(f"{name}: 0 s" in out for name in gpu.SHARES)
    assert out.rstrip().endswith("FAILED 16 x 4, rows, float32, 0.1: output is off")


def test_a_comparison_that_fails_or_raises_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: str) -> list:
        raise RuntimeError("device-side assert")

    wrong = {"wrong": lambda device: [parity.rmm_kernels_parity.Check("SᵀX", float("nan"), 1.0)], "broken": broken}
    monkeypatch.setattr(parity.rmm_kernels_parity, "comparisons", lambda: wrong)
    found = parity.compare("cpu", ["wrong", "broken"])
    assert [row.status for row in found] == ["failed", "RuntimeError: device-side assert"]


def test_a_process_of_comparisons_that_ends_is_a_row_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(function, *arguments, timeout):
        raise ProcessError("compare ended its process with status -6")

    monkeypatch.setattr(parity, "call", crash)
    monkeypatch.setattr(gpu, "call", lambda *arguments, **options: [])
    assert gpu.gpu(tmp_path, ["parity", "linear"], device="cpu", tiny=True, commit="abc") == 1
    rows = read_rows(tmp_path / "parity-cpu.csv", Parity)
    assert len(rows) == len(list(parity.rmm_kernels_parity.comparisons())[::16])
    assert {row.status for row in rows} == {"compare ended its process with status -6"}
    assert capsys.readouterr().out.count("FAILED parity: ") == len(rows)
