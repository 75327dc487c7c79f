"""Every table of the pages is what ``python -m benchmarks table --check`` makes, of rows that can be compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from frontier_helpers import epoch, noisy, point

from benchmarks.frontier.aggregate import comparable, score_text, tasks_of
from benchmarks.frontier.methods import METHODS
from benchmarks.frontier.rows import Cost, Epoch
from benchmarks.pages import fill
from benchmarks.pages.frontier_noise import TABLES, predictions
from benchmarks.records import write_rows
from rmm_linear.variance import effective_batch

BEGIN, END = "<!-- table: readme -->", "<!-- end -->"


def test_pages_have_the_tables_of_the_results() -> None:
    assert fill.update(check=True), "run: python -m benchmarks table"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"<!-- table: none -->\n{END}", "there is no table none. It must be one of .*linear-cpu"),
        (BEGIN, "the table readme must end with <!-- end -->, which is missing"),
        (f"{BEGIN}\n{BEGIN}\n{END}", "the table readme must end with <!-- end --> before readme begins"),
        (f"<!-- table: linear-cuda -->\n{END}", "the table linear-cuda needs .*linear-cuda.csv"),
    ],
)
def test_a_region_that_cannot_be_filled_names_its_page_and_the_rule(text: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(text)
    with pytest.raises(ValueError, match=f"page.md: {error}"):
        fill.update(root=tmp_path)


def test_a_page_that_is_out_of_date_fails_the_check_and_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, old = tmp_path / "README.md", f"before\n{BEGIN}\nold\n{END}\nafter\n"
    page.write_text(old)
    monkeypatch.setitem(fill.TABLES, "readme", lambda results: "| new |")
    assert fill.update(root=tmp_path, check=True) is False
    assert page.read_text() == old
    assert fill.update(root=tmp_path)
    assert fill.update(root=tmp_path, check=True)
    assert page.read_text() == old.replace("old", "| new |")


def test_means_are_of_seeds_and_tasks_that_all_methods_have() -> None:
    costs = [
        Cost(task=task, method=one) for task in ("cola", "rte", "stsb") for one in ("exact", "checkpoint", "tenth")
    ]
    costs.append(Cost(task="cola", method="fp8"))  # it was not trained yet
    epochs = [epoch("exact", seed, 0.5, task) for task in ("cola", "stsb") for seed in range(5)]
    epochs += [epoch("tenth", seed, 0.5 + 0.1 * seed) for seed in range(3)]
    epochs += [epoch("tenth", seed, 0.4 if seed < 3 else 0.8, "stsb") for seed in range(4)]
    epochs += [epoch("exact", seed, 0.5, "rte") for seed in range(5)] + [epoch("tenth", 0, 0.9, "rte")]
    epochs += [epoch(method, 0, 0.5, "sst2") for method in ("exact", "tenth")]
    costs += [Cost(task="sst2", method=method) for method in ("exact", "tenth")]
    assert tasks_of(epochs, costs) == ["cola", "stsb", "rte"]
    found = comparable(epochs, costs)
    assert {row.seed for row in found if row.task == "cola"} == {0, 1, 2}
    assert {row.seed for row in found if row.task == "stsb"} == {0, 1, 2, 3}
    # 10 of 0, 10 and 20 with an error of 10 / √3, and 0 of −10, −10, −10 and 30 with one of 10.
    assert score_text(found, ["cola", "stsb"], "tenth") == "+5.0 ± 5.8"
    assert score_text(found, ["cola"], "fp8") == ""
    assert score_text(found, ["cola", "rte"], "tenth") == ""  # of the one seed on RTE, no mean over tasks is made


def test_a_loss_is_told_from_exact_where_all_of_its_interval_is_above_it(tmp_path: Path) -> None:
    def runs(method: str, losses: list[float], settings: str) -> list[Epoch]:
        made = [epoch(method, seed, 0.5, "cola-slow") for seed in range(len(losses))]
        return [replace(one, train_loss=loss, settings=settings) for one, loss in zip(made, losses, strict=True)]

    def now(method: str) -> str:
        return METHODS[method].settings()

    rows = runs("exact", [1.0, 1.0, 1.0], "{}") + runs("careful", [1.03, 1.03, 1.05], now("careful"))
    write_rows(tmp_path / "frontier-accuracy.csv", [*rows, *runs("tenth", [1.9, 1.9, 1.9], "another")])
    points = [replace(point("exact", 8, 2.0, step=200), seed=seed) for seed in (0, 1)]
    made = [replace(point("careful", 8, loss, step=200), seed=seed) for seed, loss in enumerate((2.0, 2.2))]
    made.append(replace(point("smallest", 8, 2.1, step=200), settings=now("smallest")))
    points += [replace(one, settings=now(one.method)) for one in made]
    write_rows(tmp_path / "frontier-curves.csv", points)
    lines = [line.split("|")[2:-1] for line in TABLES["frontier-told"](tmp_path).splitlines()[2:]]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["ours, careful", "+3.67 ± 0.67 %", "yes", "+0.00 ± 0.00", "3"],
        ["ours, careful", "+5.00 ± 5.00 %", "no", "", "2"],
        ["ours, smallest", "+5.00 %", "?", "", "1"],
    ]


@pytest.mark.parametrize(("loss", "found"), [(1.9, None), (2.5, 32**0.5), (3.0, 4), (3.5, 8**0.5), (4.1, None)])
def test_the_batch_found_lies_between_those_that_were_run(loss: float, found: float | None) -> None:
    points = [point("exact", size, value) for size, value in {8: 2.0, 4: 3.0, 2: 4.0}.items()]
    # Rows that were seen before make another comparison, and noise after that is none of it.
    points += [point("tenth", 8, loss), point("exact", 8, 0.1, step=200, epoch=1.8)]
    points += [point("tenth", 8, 0.1, step=200, epoch=1.8), replace(point("tenth", 8, 2.0), seed=1)]
    noises = [noisy(1.0), noisy(3.0, block="layers.1"), noisy(0.0, block="head"), noisy(99.0, step=150)]
    (run,) = predictions(points, noises)
    assert run.found == (None if found is None else pytest.approx(found))
    # Of the whole (1 + 3 + 0) / 6, of the median block 1 / 2.
    assert run.predicted == [effective_batch(8, 4 / 6), effective_batch(8, 0.5)]
