"""``python -m benchmarks gpu``: what fails costs nothing else; the largest batch; what compilers say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rmm_kernels_moved

from benchmarks.__main__ import main
from benchmarks.gpu import command, compiled, largest
from benchmarks.gpu.compiled import CompiledRow
from benchmarks.gpu.largest import EXACT, search_in
from benchmarks.processes import ProcessError
from benchmarks.records import RESULTS, Parity, read_rows

NEVER = float("inf")
NAMES = """
from compile_kernels import cases, targets_of
from rmm_kernels_moved import moved
for name, _, dtype, constants in cases():
    for target in targets_of(name):
        print(name, target, moved(name, dtype, constants), sep=";")
"""


def gpu(out: Path, *sections: str) -> int:
    return main(["gpu", "--device", "cpu", "--tiny", "--commit", "abc", "--out", str(out), "--sections", *sections])


def test_a_failing_section_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def crash(function, *arguments, timeout):
        if arguments[0] == "linear":
            raise ProcessError("suite_section ended its process with status -6")
        return ["16 x 4, rows, float32, 0.1: output is off"] if arguments[0] == "host" else []

    monkeypatch.setattr(command, "call", crash)
    for section in ("run_parity", "run_steps", "run_largest"):
        monkeypatch.setattr(command, section, lambda *arguments, **options: [])
    assert gpu(tmp_path, *command.SHARES) == 1
    expected = "linear: suite_section ended its process with status -6\n16 x 4, rows, float32, 0.1: output is off\n"
    assert (tmp_path / "failures-cpu.txt").read_text() == expected
    out = capsys.readouterr().out
    assert all(f"{name}: 0 s" in out for name in command.SHARES)
    assert out.rstrip().endswith("FAILED 16 x 4, rows, float32, 0.1: output is off")


def test_comparisons_that_fail_raise_or_end_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: str) -> list:
        raise RuntimeError("device-side assert")

    def crash(function, *arguments, timeout):
        raise ProcessError("compare ended its process with status -6")

    wrong = {"wrong": lambda device: [command.rmm_kernels_parity.Check("SᵀX", float("nan"), 1.0)], "broken": broken}
    monkeypatch.setattr(command.rmm_kernels_parity, "comparisons", lambda: wrong)
    found = command.compare("cpu", ["wrong", "broken"])
    assert [row.status for row in found] == ["failed", "RuntimeError: device-side assert"]
    monkeypatch.setattr(command, "call", crash)
    assert gpu(tmp_path, "parity") == 1
    rows = read_rows(tmp_path / "parity-cpu.csv", Parity)
    assert [row.status for row in rows] == ["compare ended its process with status -6"]


@pytest.mark.parametrize("limit", [0, 1, 7, 8, 100, 12_345])
@pytest.mark.parametrize("grain", [1, 50])
def test_what_is_found_fits_and_a_16th_more_does_not(limit: int, grain: int) -> None:
    """Bytes grow by 7 a sequence, in grains as allocators have them; beyond the limit nothing fits."""
    tried = list[int]()

    def peak(size: int) -> int | None:
        tried.append(size)
        return 500 + 7 * (size // grain * grain) if size <= limit else None

    for memory, first in ((500 + 7 * limit, 8), (10**9, 1), (10**9, 100)):  # as the bytes foretell, and long before
        tried.clear()
        found, status = largest.largest(peak, memory, first, NEVER)
        assert status == "ok"
        assert found <= limit < found + max(1, found // 16)
        assert len(tried) == len({*tried}) <= 25


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["roberta-base", "llama, 1.1 billion"])
def test_methods_that_keep_less_train_larger_batches(case: str) -> None:
    (exact,) = search_in(case, EXACT, "cpu", True, NEVER, None)
    compared, ours = search_in(case, "default", "cpu", True, NEVER, exact["batch"])
    assert exact["status"] == ours["status"] == compared["status"] == "ok"
    assert ours["batch"] > 2 * exact["batch"] == 2 * compared["batch"]
    assert compared["peak"] < exact["peak"]
    for row in (exact, ours):
        assert 0.8 * row["memory"] < row["peak"] <= row["memory"]


def test_what_does_not_fit_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def trial(text: str) -> Any:
        def made(*arguments: object) -> None:
            raise RuntimeError(text)

        return made

    case = "llama, 3.2 billion"
    monkeypatch.setattr(largest, "Trial", trial("CUDA out of memory"))
    (row,) = search_in(case, "default", "cuda", False, NEVER, None)
    full = largest.Largest(case=case, provider="default", **row)
    slow = largest.Largest(case=case, provider="default", status=f"{largest.NO_TIME}: at least 0, times 256 tokens")
    assert (full.batch, largest.has_failed(full), largest.has_failed(slow)) == (0, False, True)
    monkeypatch.setattr(largest, "Trial", trial("an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal"):
        search_in(case, "default", "cuda", False, NEVER, None)


@pytest.mark.thorough
def test_the_longest_sequence_and_published_settings() -> None:
    """Of one sequence, 256 tokens are a step; a published batch is measured and no other."""
    case = "llama, 1.1 billion, one sequence"
    chunks, ours = (search_in(case, name, "cpu", True, NEVER, None)[0] for name in ("loss in chunks", "default"))
    assert ours["status"] == chunks["status"] == "ok"
    assert (ours["batch"], ours["length"] % 256) == (1, 0)
    assert ours["length"] > 1.5 * chunks["length"]
    found = {
        (name, provider): search_in(f"llama, 3.2 billion{name}", provider, "cpu", True, NEVER, None)
        for name in ("", ", LoRA", ", VeLoRA")
        for provider in largest.CASES[f"llama, 3.2 billion{name}"].providers
    }
    rows = {key: row for key, (row,) in found.items()}
    assert {(row["what"], row["status"]) for row in rows.values()} == {("published", "ok")}
    assert {row["batch"] for row in rows.values()} == {2, 4}
    assert rows["", "torch checkpoint, loss in chunks"]["peak"] < rows["", "loss in chunks"]["peak"]
    assert rows[", LoRA", "torch checkpoint"]["peak"] < rows[", LoRA", EXACT]["peak"]
    assert rows[", LoRA", "default"]["peak"] < 0.7 * min(rows[name, EXACT]["peak"] for name in (", LoRA", ", VeLoRA"))


def test_the_committed_table_of_compiled_kernels_has_every_variant() -> None:
    """Not their registers, which change with Triton's version. Else run: python -m benchmarks compile."""
    environment = os.environ | {"PYTHONPATH": str(compiled.PROGRAM.parent)}
    command = [sys.executable, "-W", "ignore", "-c", NAMES]  # a process of its own imports Triton
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    variants = {
        (*compiled.split(name), target): formula
        for name, target, formula in (line.split(";") for line in done.stdout.splitlines())
    }
    rows = [row for target in compiled.TARGETS for row in read_rows(RESULTS / compiled.csv_name(target), CompiledRow)]
    assert {(row.kernel, row.variant, row.target): row.moved for row in rows} == variants
    for row in rows:
        assert (row.spilled_bytes is None) == (row.target == "gfx942") == (row.scalars is not None)
        assert (row.spilled_bytes or row.spilled_registers or 0) <= (0 if row.default_path else 24)
        assert row.moved_per_element == pytest.approx(rmm_kernels_moved.value(row.moved), abs=1e-6)


def test_what_compilers_say_becomes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variants whose integers are 1, which no layer has."""
    said = {"target": "sm_90", "moved": "2 + 4/8", "shared": 7, "registers": 9, "wide_loads": 1, "spilled_bytes": 0}
    lines = [json.dumps({"name": name, **said}) for name in ("pack 4 *bf16", "pack 4 *bf16 of ones")]
    program = tmp_path / "program.py"
    monkeypatch.setattr(compiled, "PROGRAM", program)
    program.write_text("".join(f"print({line!r})\n" for line in lines))
    assert main(["compile", "--out", str(tmp_path), "--commit", "abc"]) == 0
    (row,) = read_rows(tmp_path / compiled.csv_name("sm_90"), CompiledRow)
    assert (row.kernel, row.variant, row.registers, row.shared) == ("pack", "4 bf16", 9, 7)
    assert (row.moved_per_element, row.bytes_allow, row.default_path, row.limit) == (2.5, 24.8, 1, 30)
