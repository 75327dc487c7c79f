"""Results as csv files: what is written is read again, the committed files too."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks.frontier import rows as frontier
from benchmarks.frontier.rows import Epoch
from benchmarks.frontier.shares import Share
from benchmarks.gpu.compiled import CompiledRow
from benchmarks.noise.blocks import BlockRow, LeftRow, PeakRow
from benchmarks.planning.chains import Cost, Run, Subset
from benchmarks.planning.fit_frontier import Fitted
from benchmarks.planning.fit_neighbours import Neighbour
from benchmarks.planning.fit_paper import Paper
from benchmarks.planning.fit_solvers import Solved
from benchmarks.planning.graphs import Planned
from benchmarks.planning.sweep import Steps, Waits
from benchmarks.records import RESULTS, Origin, Parity, Row, Sampled, Surveyed, origin, read_rows, write_rows

KINDS = {
    "noise": Surveyed,
    "sampling": Sampled,
    "blocks-left": LeftRow,
    "blocks-peaks": PeakRow,
    "kernels-compiled": CompiledRow,
    "chains-bptt": Run,
    "chains-costs": Cost,
    "chains-subsets": Subset,
    "chains-sweep-steps": Steps,
    "chains-sweep-waits": Waits,
    "fit-frontier": Fitted,
    "fit-neighbours": Neighbour,
    "fit-paper": Paper,
    "fit-solvers": Solved,
    "frontier-accuracy": Epoch,
    "frontier-cost": frontier.Cost,
    "frontier-curves": frontier.Point,
    "frontier-noise": frontier.Noisy,
    "frontier-shares": Share,
    "graphs-order": Planned,
    "graphs-paper": Planned,
    "graphs-real": Planned,
}


def test_a_run_replaces_its_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "linear-cpu.csv"
    rows = [
        Row("linear", "a, b", "paper", "float32", median=0.125, kept_bytes=3),
        Row("linear", "c", "rows", "float32"),
    ]
    write_rows(path, rows * 2)
    write_rows(path, rows)
    assert read_rows(path, Row) == rows
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("suite,case\nlinear,a\n")
    with pytest.raises(ValueError, match=r"must have the columns suite, case.*Run the benchmark again"):
        read_rows(path, Row)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.csv")), ids=lambda path: path.name)
def test_the_committed_results_are_read_to_the_last_digit(path: Path, tmp_path: Path) -> None:
    kind = KINDS.get(path.stem, BlockRow if path.stem.startswith("blocks-") else Row)
    rows = read_rows(path, kind)
    with path.open(newline="", encoding="utf-8") as file:
        texts = list(csv.DictReader(file))
    assert len(rows) == len(texts) > 0
    for row, text in zip(rows, texts, strict=True):
        found = dataclasses.asdict(row)
        assert found.keys() == text.keys()
        for name, value in found.items():
            assert value == (
                float(text[name])
                if isinstance(value, float)
                else type(value)(text[name] or 0)
                if isinstance(value, int)
                else text[name] or value
            ), name
    write_rows(tmp_path / "again.csv", rows)
    assert read_rows(tmp_path / "again.csv", kind) == rows


def test_every_row_says_where_it_comes_from() -> None:
    about = origin("cpu", "abc")
    assert about.keys() == {field.name for field in dataclasses.fields(Origin)}
    assert all(about.values())
    assert about["commit"] == "abc"
    assert Parity("countsketch", **about).torch == torch.__version__
