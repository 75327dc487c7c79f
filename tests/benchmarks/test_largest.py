"""The largest batch that a device holds: what is found fits, and hardly more does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, largest_search
from benchmarks import largest as module
from benchmarks.largest import Largest, run_largest, search_in
from benchmarks.largest_search import is_full, largest
from benchmarks.largest_trial import EXACT
from benchmarks.processes import ProcessError
from benchmarks.records import read_rows

NEVER = float("inf")


@pytest.mark.parametrize("first", [1, 8, 100])
@pytest.mark.parametrize("limit", [0, 1, 7, 8, 100, 12_345])
@pytest.mark.parametrize("grain", [1, 3, 50])
def test_what_is_found_fits_and_a_16th_more_does_not(first: int, limit: int, grain: int) -> None:
    """Bytes grow by 7 a sequence, in grains as allocators have them; beyond the limit nothing fits."""
    tried = list[int]()

    def peak(size: int) -> int | None:
        tried.append(size)
        return 500 + 7 * (size // grain * grain) if size <= limit else None

    for memory in (500 + 7 * limit, 10**9):  # as the bytes foretell, and long before
        tried.clear()
        found, status = largest(peak, memory, first, NEVER)
        assert status == "ok"
        assert found <= limit < found + max(1, found // 16)
        assert len(tried) == len({*tried}) <= 25
        assert min(tried) > 0


def test_bytes_foretell_the_largest_batch() -> None:
    tried = list[int]()

    def peak(size: int) -> int | None:
        tried.append(size)
        return 500 + 7 * size if 500 + 7 * size <= 100_000 else None

    assert largest(peak, 100_000, 8, NEVER) == (14_214, "ok")
    assert tried == [8, 32, 2048, 14_214, 14_214 + 14_214 // 16]


def test_a_search_ends_with_its_time_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert largest(lambda size: 1, 2, 4, time.time() - 1) == (0, "no more time: at least 0")

    def peak(size: int) -> int:
        if size > 20:
            raise RuntimeError("an illegal memory access\nand more")
        return size

    assert largest(peak, 1000, 4, NEVER) == (16, "with 1000: an illegal memory access")
    now = [0.0]
    monkeypatch.setattr(largest_search.time, "time", lambda: now[0])

    def slow(size: int) -> int:
        now[0] += size
        return size

    # 4 and 16 took 20 seconds; 1000 would end at 1020.
    assert largest(slow, 1000, 4, 1019.0) == (16, "no more time: at least 16")
    assert now == [20.0]


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_memory_that_is_too_small_has_many_words(error: RuntimeError, found: bool) -> None:
    assert is_full(error) == found


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["roberta-base", "llama, 1.1 billion"])
def test_methods_that_keep_less_train_larger_batches(case: str) -> None:
    (exact,) = search_in(case, EXACT, "cpu", True, NEVER, None)
    compared, ours = search_in(case, "default", "cpu", True, NEVER, exact["batch"])
    assert exact["status"] == ours["status"] == compared["status"] == "ok"
    assert (compared["what"], compared["batch"]) == ("exact's largest", exact["batch"])
    assert ours["batch"] > 2 * exact["batch"]
    assert compared["peak"] < exact["peak"]
    for row in (exact, ours):
        assert 0.8 * row["memory"] < row["peak"] <= row["memory"]
        assert row["tokens_per_second"] == pytest.approx(row["batch"] * 32 / row["seconds"])


def test_a_batch_that_does_not_fit_again_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(trial: object, batch: int, end: float) -> dict:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module.Trial, "measured", full)
    (row,) = search_in("roberta-base", EXACT, "cpu", True, NEVER, None)
    assert row["batch"] > 0
    assert row["status"] == "when it was measured: CUDA out of memory"


def test_methods_that_fail_are_rows_and_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list[tuple]()

    def search(function, case, provider, device, tiny, end, exact, *, timeout):
        asked.append((case, provider, exact))
        assert 0 < end - time.time() < timeout
        if provider == "default":
            raise ProcessError("traceback\nsearch_in ended its process with status -6")
        status = "no more time: at least 12" if provider == "torch checkpoint" else "ok"
        return [{"status": status, "batch": 12, "length": 32, "memory": 10**9, "peak": 9 * 10**8, "seconds": 2.0}]

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
