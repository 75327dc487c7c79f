"""The committed table of what compilers say has all that the code has, and says that nothing ran."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import rmm_kernels_moved

from benchmarks import compiled
from benchmarks.__main__ import main
from benchmarks.compiled import CompiledRow
from benchmarks.records import RESULTS, read_rows

ROWS = read_rows(RESULTS / compiled.NAME, CompiledRow)
NAMES = """
from compile_kernels import TARGETS, cases
from rmm_kernels_moved import moved
for name, _, dtype, constants in cases():
    for target in TARGETS:
        print(name, target, moved(name, dtype, constants), sep=";")
"""


@pytest.fixture(scope="module")
def variants() -> dict[tuple[str, str, str], str]:
    """Kernel, variant and target to the formula, as the code has them now; a process of its own imports Triton."""
    environment = os.environ | {"PYTHONPATH": str(compiled.PROGRAM.parent)}
    command = [sys.executable, "-W", "ignore", "-c", NAMES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split(";") for line in done.stdout.splitlines()]
    return {(*compiled.split(name), target): formula for name, target, formula in lines}


def test_the_committed_table_has_every_variant_for_every_target(variants: dict) -> None:
    """Not their registers, which change with Triton's version. Else run: python -m benchmarks compile."""
    assert {(row.kernel, row.variant, row.target): row.moved for row in ROWS} == variants
    assert len(ROWS) == len(variants) >= 180


def test_every_row_says_that_nothing_ran_and_what_compiled_it() -> None:
    for row in ROWS:
        assert row.device == "compiled, not run"
        assert row.triton
        assert row.commit
        assert not row.commit.endswith("-dirty")
        assert row.registers > 0
        assert (row.spilled_bytes is None) == (row.target == "gfx942") == (row.scalars is not None)
        assert not row.spilled_bytes
        assert not row.spilled_registers
        assert row.moved_per_element == pytest.approx(rmm_kernels_moved.value(row.moved), abs=1e-6)


def test_a_kernel_that_does_not_compile_is_an_error_and_leaves_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "broken.py"
    program.write_text("raise SystemExit('CompilationError: at 3:4')")
    monkeypatch.setattr(compiled, "PROGRAM", program)
    assert main(["compile", "--out", str(tmp_path)]) == 2
    assert "Every kernel must compile, got: CompilationError: at 3:4" in capsys.readouterr().err
    assert list(tmp_path.glob("*.csv")) == []


def test_what_the_program_prints_becomes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variants whose integers are 1, which no layer has."""
    said = {"target": "sm_90", "moved": "2 + 4/8", "shared": 7, "registers": 9, "wide_loads": 1, "spilled_bytes": 0}
    lines = [json.dumps({"name": name, **said}) for name in ("pack 4", "pack 4 of ones")]
    program = tmp_path / "prints.py"
    program.write_text("".join(f"print({line!r})\n" for line in lines))
    monkeypatch.setattr(compiled, "PROGRAM", program)
    assert main(["compile", "--out", str(tmp_path), "--commit", "abc"]) == 0
    (row,) = read_rows(tmp_path / compiled.NAME, CompiledRow)
    assert (row.kernel, row.variant, row.registers, row.shared, row.moved_per_element) == ("pack", "4", 9, 7, 2.5)
    assert row.commit == "abc"
