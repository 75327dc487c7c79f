"""Pictures and tables follow from the csv files."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmark_helpers import empty_pages

from benchmarks import pages
from benchmarks.__main__ import main
from benchmarks.plots import plot_linear
from benchmarks.records import RESULTS, Row, read_rows


def test_no_two_lines_of_a_picture_look_the_same():
    rows = [row for row in read_rows(RESULTS / "linear-cpu.csv", Row) if row.ratio == 0.1 and row.median is not None]
    legend = plot_linear(rows).legends[0].legend_handles
    looks = [(line.get_marker(), line.get_color()) for line in legend[:-2]]  # without the limit and nn.Linear
    assert len(set(looks)) == len(looks) == len({row.provider for row in rows}) - 1


def test_no_results_make_no_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "--out", str(tmp_path)]) == 2
    assert "Run python -m benchmarks run first" in capsys.readouterr().err


def test_pages_have_the_tables_of_the_results() -> None:
    assert pages.update(check=True), "run: python -m benchmarks table"


def test_pages_take_the_committed_results_and_nothing_else_of_them_changes(tmp_path: Path) -> None:
    root = empty_pages(tmp_path)
    assert pages.update(root=root)
    performance, sampling = (
        (root / "docs" / name).read_text(encoding="utf-8") for name in ("benchmarks.md", "estimators.md")
    )
    assert all(text.startswith("before\n<!-- ") and text.endswith(" -->\nafter\n") for text in (performance, sampling))
    cells = {tuple(cell.strip() for cell in line.split("|")) for line in (performance + sampling).splitlines()}
    exact = ("", "roberta-base 8 x 128, fp32: exact", "3.16 s", "1.00", "582.8 MiB (100%)", "")
    every = ("", "roberta-base 8 x 128, fp32: countsketch, all linear layers", "2.44 s", "0.77", "388.9 MiB (67%)", "")
    example = ("", "roberta-base 8 x 128, fp32: default, example=", "3.19 s", "1.01", "56.7 MiB (10%)", "")
    assert cells >= {exact, every, example, ("", "the true ‖y‖", "1.68", "1.87", "0.02", "0.26", "")}
    assert "PyTorch 2.13.0+cpu, commit `c3aa8dea8c09`, 2026-11-24, by" in performance


BEGIN, END = "<!-- x: begin -->", "<!-- x: end -->"


@pytest.mark.parametrize("text", [None, "", f"{END}{BEGIN}", f"{BEGIN}{END}" * 2], ids=str)
def test_markers_that_are_not_there_once_are_an_error(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "page.md").write_text(text)
    with pytest.raises(ValueError, match=r"page\.md must have .* once each, in this order"):
        pages.inserted(tmp_path / "page.md", "content", "x")


def test_a_table_without_its_page_is_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pages, "GENERATED", [(str(tmp_path / "none.md"), "x", lambda results: "")])
    assert main(["table"]) == main(["table", "--check"]) == 2
    assert capsys.readouterr().err.count("none.md must have the lines <!-- x: begin --> and <!-- x: end -->") == 2


def test_a_page_that_is_out_of_date_fails_the_check_and_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(BEGIN + END)
    monkeypatch.setattr(pages, "GENERATED", [(str(page), "x", lambda results: "a table")])
    assert main(["table", "--check"]) == 1
    assert capsys.readouterr().err == "A page is out of date. Run: python -m benchmarks table\n"
    assert page.read_text() == BEGIN + END
    assert main(["table"]) == main(["table", "--check"]) == 0
    assert page.read_text() == f"{BEGIN}\n\na table\n\n{END}"
