"""Plans for whole networks: the command writes what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.graphs import Planned
from benchmarks.records import read_rows

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()


@pytest.mark.thorough
def test_the_command_writes_and_prints_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = ["--parts", "real", "paper", "--tiny", "--out", str(tmp_path), "--commit", "abc"]
    assert main(["graphs", *parts]) == 0
    printed = capsys.readouterr().out
    rows = read_rows(tmp_path / "graphs-real.csv", Planned)
    assert {row.commit for row in rows} == {"abc"}
    assert [row.method for row in rows] == ["plain", "cuts", "chen", "kusumoto"]
    for row in rows:
        assert row.predicted == row.live
        assert row.is_equal in ("", "equal")
        assert row.with_workspace == pytest.approx(row.allocated, rel=0.03)
    assert min(row.with_workspace for row in rows) == rows[1].with_workspace <= rows[0].with_workspace
    assert (tmp_path / "graphs-memory.png").stat().st_size > 10_000
    (plain, cuts, *_) = read_rows(tmp_path / "graphs-paper.csv", Planned)
    assert plain.part == "paper"
    assert cuts.predicted < 0.6 * plain.predicted  # without the workspace, which is the processor's
    for row in rows:
        assert f"{row.predicted:,}" in printed


def test_networks_of_other_sizes_have_published_figures() -> None:
    from benchmarks.graph_networks import PUBLISHED, large

    assert large(False).keys() == PUBLISHED.keys()
