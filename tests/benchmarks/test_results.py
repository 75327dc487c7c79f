"""One tiny run of every suite: what is measured is right, pictures, tables and the summary follow from it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.gpu import command as gpu
from benchmarks.gpu.command import rmm_kernels_parity
from benchmarks.records import Parity, Row, read_rows
from benchmarks.suites import SUITES

ALONE = """
import sys

EXTRAS = "datasets evaluate pandas matplotlib scipy sklearn kernels peft accelerate".split()
FINDERS = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", str(finder))]

class Alone:
    def find_spec(self, name, path=None, target=None):
        if name not in EXTRAS:
            return next((s for finder in FINDERS if (s := finder.find_spec(name, path, target)) is not None), None)

    def find_distributions(self, context):
        for finder in FINDERS if context.name not in EXTRAS else ():
            yield from getattr(finder, "find_distributions", lambda context: ())(context)

sys.meta_path[:] = [Alone()]
"""


@pytest.fixture(scope="module", params=[pytest.param("gpu", marks=pytest.mark.thorough)])
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run `gpu` on the CPU, kernels in Triton's interpreter, in a copy that is not installed and finds no extras."""
    out, checkout = tmp_path_factory.mktemp("results"), tmp_path_factory.mktemp("checkout")
    root = Path(__file__).resolve().parents[2]
    for package in ("rmm_linear", "kernels", "benchmarks"):
        shutil.copytree(root / package, checkout / package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (checkout / "sitecustomize.py").write_text(ALONE, encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks", "gpu", "--device", "cpu", "--tiny", "--commit", "abc"]
    paths = {"PYTHONPATH": str(checkout), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [*command, "--out", str(out)], cwd=checkout, env=os.environ | paths, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert main(["run", "--tiny", "--suite", "linear", "--out", str(out), "--commit", "abc", "--seed", "5"]) == 0
    return out


def rows_of(results: Path, suite: str) -> list[Row]:
    return read_rows(results / f"{suite}-cpu.csv", Row)


@pytest.mark.parametrize("suite", SUITES)
def test_every_provider_is_measured_in_every_case(results: Path, suite: str) -> None:
    rows = rows_of(results, suite)
    cases = [dataclasses.replace(case, backend="triton") for case in SUITES[suite].cases("cpu", tiny=True)]
    expected = [(case.name, provider) for case in cases for provider in SUITES[suite].providers(case)]
    assert [(row.case, row.provider) for row in rows] == expected
    for row in rows:
        assert (row.status, row.commit, row.torch) == ("ok", "abc", torch.__version__)
        assert 0 < (row.lower or 0) <= (row.median or 0) <= (row.upper or 0)
        assert row.threads == getattr(SUITES[suite], "THREADS", torch.get_num_threads())


def test_bytes_moved_and_shares_of_bandwidth_are_those_of_the_copy(results: Path) -> None:
    rows = rows_of(results, "kernels")
    copy = rows[0]
    for row in rows:
        share = (row.moved_bytes / row.median) / (copy.moved_bytes / copy.median)
        assert row.copy_share == pytest.approx(share, rel=1e-4)
    by_name = {row.provider: row.moved_bytes for row in rows}
    assert by_name["copy"] == 2 * 96 * 64 * 4
    assert by_name["countsketch"] == (96 + 10) * 64 * 4
    assert by_name["rows"] == (10 + 10) * 64 * 4
    assert by_name["row norms"] == 96 * 64 * 4 + 96 * 4
    assert by_name["pack 4 bits"] == by_name["unpack 4 bits"] == 96 * 64 * 4 + 96 * (32 + 1)
    assert by_name["countsketch 4 bits"] == 96 * 64 * 4 + 10 * (32 + 1)
    moved = {(row.case.split()[0], row.provider): row.moved_bytes for row in rows_of(results, "operators")}
    half, single = 16 * 66, 4 * 16 * 66
    seed, groups = 16, 16 * 2  # bytes of a seed as it is padded, and of two groups' scales
    # The norm's 2-bit codes and rstd; γ, β, dγ and dβ of 66 elements each.
    norm = seed + 64 + -(-16 * 17 // 16) * 16 + groups
    assert moved["layer", "pack"] == single + norm
    assert moved["layer", "apply"] == norm + 2 * single + 2 * 4 * 66
    assert moved["gelu", "pack"] == single + seed + half // 2
    assert moved["swiglu", "apply"] == 3 * single + seed + 2 * (half // 2 + groups)
    assert moved["dropout", "pack"] == half + 16 * 9


def test_kept_bytes_of_a_layer_are_those_of_the_formula(results: Path) -> None:
    kept = {row.provider: row.kept_bytes for row in rows_of(results, "linear")}
    assert kept["nn.Linear"] == 512 * 64 * 4
    assert kept["paper"] == 51 * 64 * 4 + 8  # and the seed
    assert kept["countsketch"] == kept["rows"] == 64 * 64 * 4 + 8  # min_rows
    assert kept["countsketch 4 bits"] == 397 * (32 + 1) + 8


def test_all_sections_of_gpu_leave_their_csv(results: Path) -> None:
    names = {f"{name}-cpu.csv" for name in gpu.SHARES}
    assert set(gpu.SHARES) == {"parity", "steps", "largest", *SUITES}
    assert {path.name for path in results.glob("*.csv")} == names
    assert (results / "failures-cpu.txt").read_text() == ""
    parity_rows = read_rows(results / "parity-cpu.csv", Parity)
    assert len({row.comparison for row in parity_rows}) == len(list(rmm_kernels_parity.comparisons())[::16])
    assert {row.status for row in parity_rows} == {"ok"}
    assert gpu._summary(results, "cpu", []).endswith("nothing failed")
