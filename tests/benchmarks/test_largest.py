"""The largest batch that a device holds: what is found fits, and hardly more does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks import largest as module
from benchmarks.largest import EXACT, Largest, largest, run_largest, search_in
from benchmarks.processes import ProcessError
from benchmarks.records import read_rows


@pytest.mark.parametrize("first", [1, 8, 100])
@pytest.mark.parametrize("limit", [0, 1, 7, 8, 100, 12_345])
def test_what_is_found_fits_and_a_16th_more_does_not(first: int, limit: int) -> None:
    tried = list[int]()

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    found, status = largest(fits, first, 60.0)
    assert status == "ok"
    assert found <= limit <= found + max(1, found // 16) - (found > 0)
    assert len(tried) == len({*tried}) <= 25
    assert min(tried) > 0


def test_a_search_ends_with_its_time_or_an_error() -> None:
    assert largest(lambda size: True, 4, -1.0) == (0, "no more time: at least 0")

    def fits(size: int) -> bool:
        if size > 20:
            raise RuntimeError("an illegal memory access\nand more")
        return True

    assert largest(fits, 4, 60.0) == (16, "with 32: an illegal memory access")


@pytest.mark.parametrize("case", ["roberta-base", pytest.param("llama, 1.1 billion", marks=pytest.mark.thorough)])
def test_methods_that_keep_less_train_larger_batches(case: str) -> None:
    (exact,) = search_in(case, EXACT, "cpu", True, 60.0, None)
    compared, ours = search_in(case, "default", "cpu", True, 60.0, exact["batch"])
    assert exact["status"] == ours["status"] == compared["status"] == "ok"
    assert (compared["what"], compared["batch"]) == ("exact's largest", exact["batch"])
    assert ours["batch"] > 2 * exact["batch"]
    assert compared["peak"] < exact["peak"]
    for row in (exact, ours):
        assert 0.8 * row["memory"] < row["peak"] <= row["memory"]
        assert row["tokens_per_second"] == pytest.approx(row["batch"] * 32 / row["seconds"])


def test_a_batch_that_does_not_fit_again_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(trial: object, batch: int) -> dict:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module._Trial, "measured", full)
    (row,) = search_in("roberta-base", EXACT, "cpu", True, 60.0, None)
    assert row["batch"] > 0
    assert row["status"] == "when it was measured: CUDA out of memory"


def test_methods_that_fail_are_rows_and_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list[tuple]()

    def search(function, case, provider, device, tiny, seconds, exact, *, timeout):
        asked.append((case, provider, exact))
        assert 0 < seconds < timeout
        if provider == "default":
            raise ProcessError("traceback\nsearch_in ended its process with status -6")
        return [{"batch": 12, "length": 32, "memory": 10**9, "peak": 9 * 10**8, "seconds": 2.0}]

    monkeypatch.setattr(module, "call", search)
    rows = run_largest(tmp_path / "largest-cpu.csv", "cpu", tiny=True, timeout=60.0, commit="abc")
    assert rows == read_rows(tmp_path / "largest-cpu.csv", Largest)
    assert [row.batch for row in rows if row.provider != "default"] == 5 * [12]
    assert {row.status for row in rows if row.provider == "default"} == {"search_in ended its process with status -6"}
    assert [exact for _, provider, exact in asked if provider == EXACT] == [None, None]
    assert {exact for _, provider, exact in asked if provider != EXACT} == {12}
    assert gpu.gpu(tmp_path, ["largest"], device="cpu", tiny=True, commit="abc") == 1
    out = capsys.readouterr().out
    assert "0.9 of 1 GB" in out
    assert out.count("FAILED largest: ") == 2
