"""python -m benchmarks.noise and .probe on generated sentences: what they print and draw."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks import probe
from benchmarks.noise import load_glue, main
from benchmarks.records import Surveyed, read_rows
from rmm_linear.variance.survey.survey import AUTO, PAPER


def test_the_glue_command_prints_a_table_and_draws_it(
    cola: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--data_dir", str(cola), "--tasks", "cola", "--batch", "16", "--steps", "1", "--max_seq_length", "16"]
    argv += ["--memory", "0.2", "--model_name_or_path", str(model), "--plot", str(tmp_path), "--seeds", "0", "1"]
    assert main([*argv, "--csv", str(tmp_path / "noise.csv")]) == 0
    out = capsys.readouterr().out
    assert "cola, seed 0: 16 x " in out
    assert "12 layers, 16-bit input" in out
    assert all(f"{kind}, {bits} bits" in out for kind in ("countsketch", "rows") for bits in (16, 8, 4, 2))
    assert f"cola, seed 1: picture of the variance ratio against memory: {tmp_path / 'noise-cola-1.png'}" in out
    assert (tmp_path / "noise-cola-1.png").read_bytes().startswith(b"\x89PNG")
    pyplot = sys.modules["matplotlib.pyplot"]
    assert pyplot.gca().get_title().startswith(f"{model.name}, cola: median of 12 layers, 16 x ")
    pyplot.close("all")
    assert PAPER in out
    assert AUTO not in out  # it chooses on more batches
    rows = read_rows(tmp_path / "noise.csv", Surveyed)
    printed = [float(found) for found in re.findall(rf"{re.escape(PAPER)}, 16 bits +\| ([\d.]+)", out)]
    (paper,) = (row for row in rows if row.setting.startswith(PAPER))
    assert paper.least == pytest.approx(min(printed), abs=6e-4)
    assert paper.noise == pytest.approx(sum(printed) / 2, abs=6e-4)
    assert (paper.seeds, paper.seed, paper.layers, paper.memory, paper.task) == (2, "0 1", 12, 0.2, "cola")


def test_a_short_file_is_read_again(cola: Path, model: Path) -> None:
    _, batches = load_glue("cola", cola, str(model), batch=32, steps=2, max_length=16, seed=0)
    assert [len(batch["labels"]) for batch in batches] == [32, 32, 32]  # of 48 sentences


def test_the_probe_command_prints_what_a_look_costs(
    cola: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--data_dir", str(cola), "--model_name_or_path", str(model), "--batch", "8", "--rounds", "3"]
    assert probe.main([*argv, "--every", "4"]) == 0
    out = capsys.readouterr().out
    ratio = {title: float(share) for title, share in re.findall(r"\| ([a-z ]+?) +\| [\d.]+ +\| ([\d.]+)", out)}
    assert set(ratio) == {probe.PLAIN, probe.IDLE, probe.LOOKING}
    assert ratio[probe.PLAIN] == 1
    cost = float(re.search(r"a probe every 4 steps of batch 8: (-?[\d.]+) % of training time", out)[1])
    assert cost == pytest.approx(100 * (ratio[probe.LOOKING] - 1) / 4, abs=0.02)
