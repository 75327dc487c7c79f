"""Tables of the comparison, of rows whose means are known."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from frontier_helpers import cells, epoch

from benchmarks.frontier import page, summary
from benchmarks.frontier.compared import comparable, score_text, tasks_of
from benchmarks.frontier.means import mean_over_groups
from benchmarks.frontier.rows import Cost
from benchmarks.records import write_rows


def test_methods_stand_beside_exact_runs_of_the_same_seed(tmp_path: Path) -> None:
    costs = [
        Cost(task="cola", method="exact", saved=100, kept=100, peak=200, rss=50, time=1.0, trained_time=1.0),
        Cost(task="cola", method="checkpoint", kept=10, peak=100, rss=25, time=1.5),
        Cost(
            task="cola",
            method="tenth",
            batch="204 × 10",
            trained_batch="32 × 10",
            saved=10,
            kept=12,
            peak=110,
            rss=30,
            time=1.1,
            trained_time=1.2,
            lower=0.95,
            seconds=1.0,
            upper=1.02,
        ),
    ]
    epochs = [epoch("exact", 0, 0.2), epoch("exact", 1, 0.4), epoch("exact", 2, 0.9), epoch("exact", 0, 0.1, number=1)]
    epochs += [replace(epoch("tenth", 0, 0.3), train_loss=1.01), replace(epoch("tenth", 1, 0.4), train_loss=1.04)]
    text = page.comparison(epochs, costs)
    # Standard errors: of 0.2, 0.4, 0.9 0.361 / sqrt 3; of 0.3, 0.4 and of 0.1, 0 0.0707 / sqrt 2.
    assert cells(text, "exact") == ["exact", *4 * ["100 %"], "1.00", "1.00", "50.0 ± 20.8", "", "", "3"]
    assert cells(text, "ours, default")[1:] == [
        "10 %",
        "12 %",
        "55 %",
        "60 %",
        "1.10",
        "1.20",
        "35.0 ± 5.0",
        "+5.0 ± 5.0",
        "+2.5 ± 1.5 %",
        "2",
    ]
    # Gradients of checkpointing are the exact ones; what its hooks store, the ledger does not see.
    assert cells(text, "checkpointing, all")[1:] == ["", "10 %", "50 %", "50 %", "1.50", "", "50.0 ± 20.8", "", "", "3"]
    write_rows(tmp_path / "frontier-cost.csv", costs)
    assert "35.0" not in page.page(tmp_path)
    write_rows(tmp_path / "frontier-accuracy.csv", [*epochs, epoch("exact", 0, 0.925, "sst2-full")])
    whole = page.page(tmp_path)
    assert text in whole
    assert "frontier.png" in whole
    assert "for half of the methods / for all: of times, 5 / 5 % on CoLA." in whole
    assert "on which costs are measured, the large one and the one as in training: CoLA 204 × 10 and 32 × 10." in whole
    first = summary.summary(tmp_path)
    assert "| time, 32 rows | score      | training loss |\n" in first
    assert cells(first, "exact") == ["exact", "100 %", "100 %", "1.00", "1.00", "0", "0"]
    assert cells(first, "checkpointing, all") == ["checkpointing, all blocks", "10 %", "50 %", "1.50", "", "0", "0"]
    assert cells(first, "**ours, default") == [
        "**ours, default**",
        "12 %",
        "55 %",
        "1.10",
        "1.20",
        "+5.0 ± 5.0",
        "+2.5 ± 1.5 %",
    ]
    assert cells(first, "ours, narrow") == ["ours, narrow", *6 * [""]]
    assert "Means over CoLA; up to 2 seeds; without a score, runs are not there yet." in first
    assert cells(whole[whole.index("67,349") :], "exact") == ["exact", "0", "92.5", "1.0000"]


def test_means_over_tasks_have_all_seeds_of_each() -> None:
    assert mean_over_groups([[1.0, 3.0], [4.0, 6.0, 8.0]]) == pytest.approx((4.0, (1 + 4 / 3) ** 0.5 / 2))
    mean, error = mean_over_groups([[1.0, 3.0], [4.0]]) or (0.0, 0.0)
    assert mean == 3.0
    assert math.isnan(error)
    assert mean_over_groups([[1.0], []]) is mean_over_groups([]) is None
    epochs = [epoch("exact", seed, 0.5, task) for task in ("cola", "rte") for seed in (0, 1, 2)]
    epochs += [epoch("tenth", seed, 0.5 + 0.1 * seed) for seed in (0, 1, 2)]
    epochs += [epoch("tenth", seed, 0.5, "rte") for seed in (0, 1, 7)]  # 7 has no exact run
    # 10 of 0, 10 and 20 with an error of 10 / sqrt 3, and 0 of 0 and 0.
    assert score_text(epochs, ["cola", "rte"], "tenth") == "+5.0 ± 2.9"


def test_tasks_that_lack_seeds_of_a_method_wait_for_them(tmp_path: Path) -> None:
    costs = [
        Cost(task=task, method=method, kept=kept, time=1.0)
        for task in ("cola", "rte")
        for method, kept in (("exact", 100), ("checkpoint", 10), ("tenth", 10 if task == "cola" else 30))
    ]
    epochs = [epoch(method, seed, 0.5) for method in ("exact", "tenth") for seed in (0, 1, 2)]
    epochs += [epoch("exact", seed, 0.5, "rte") for seed in (0, 1, 2)]
    epochs += [epoch("tenth", seed, 0.9, "rte") for seed in (0, 1)]
    assert tasks_of(epochs, costs) == ["cola"]
    write_rows(tmp_path / "frontier-cost.csv", costs)
    write_rows(tmp_path / "frontier-accuracy.csv", epochs)
    for text in (page.page(tmp_path), summary.summary(tmp_path)):
        assert "RTE |" not in text
        assert "10 %" in cells(text, "ours, default" if "### " in text else "**ours, default")
    epochs.append(epoch("tenth", 2, 0.9, "rte"))
    assert tasks_of(epochs, costs) == ["cola", "rte"]
    assert tasks_of([], costs) == ["cola", "rte"]
    assert cells(page.comparison(epochs, costs), "ours, default")[2] == "20 %"


def test_rows_are_of_the_seeds_that_all_methods_have_and_one_task_stands_apart(tmp_path: Path) -> None:
    costs = [
        Cost(task=task, method=method, kept=1, time=1.0)
        for task in ("cola", "stsb")
        for method in ("exact", "checkpoint", "tenth", "narrow")
    ]
    epochs = [epoch("exact", seed, 0.5, task) for task in ("cola", "stsb") for seed in range(5)]
    epochs += [epoch("tenth", seed, 0.6) for seed in range(3)]
    epochs += [epoch("narrow", seed, 0.4, task) for task in ("cola", "stsb") for seed in range(3)]
    # Two more seeds, of which the table has nothing: with all five the mean is 0.06, the median −0.1.
    epochs += [epoch("tenth", seed, 0.4 if seed < 3 else 0.8, "stsb") for seed in range(5)]
    assert {(row.task, row.seed) for row in comparable(epochs, costs)} == {
        (task, seed) for task in ("cola", "stsb") for seed in range(3)
    }
    write_rows(tmp_path / "frontier-cost.csv", costs)
    write_rows(tmp_path / "frontier-accuracy.csv", epochs)
    text = page.page(tmp_path)
    apart = ["+10.0 ± 0.0", "+0.0 ± 0.0 %", "−10.0 ± 0.0", "+0.0 ± 0.0 %", "3"]
    assert cells(text, "ours, default")[7:] == ["60.0 ± 0.0", "40.0 ± 0.0", *apart]
    assert "| score to exact | training loss to exact | score to exact, STS-B | training loss to exact, STS-B |" in text
    further = text[text.index("With all seeds") :]
    assert cells(further, "STS-B | exact") == ["STS-B", "exact", "5", "50.0 ± 0.0", "", "", ""]
    assert cells(further, "STS-B | ours, default")[2:] == ["5", "56.0 ± 9.8", "+6.0 ± 9.8", "−10.0", "3 of 5"]
    assert "STS-B | ours, narrow" not in further
    assert "CoLA  | exact         | 5 " in further
    first = summary.summary(tmp_path)
    assert cells(first, "**ours, default")[5:] == ["+10.0 ± 0.0", "+0.0 ± 0.0 %", "−10.0 ± 0.0"]
    assert cells(first, "checkpointing, all")[5:] == ["0", "0", "0"]
    assert "Means over CoLA, STS-B, of scores and losses over CoLA; up to 3 seeds;" in first
    # Alone, it is what means are taken of, with nothing beside them.
    alone = page.comparison([row for row in epochs if row.task == "stsb"], [row for row in costs if row.task == "stsb"])
    assert "to exact, STS-B" not in alone
    assert cells(alone, "ours, narrow")[-3:] == ["−10.0 ± 0.0", "+0.0 ± 0.0 %", "3"]


def test_all_versions_are_named() -> None:
    rows = [replace(epoch("exact", seed, 0.5), torch="2.13.0", transformers=f"5.2{seed}.0") for seed in (3, 4, 3)]
    assert "PyTorch 2.13.0, transformers 5.23.0, 5.24.0, commits" in page.origins(rows)


def test_the_page_says_whose_masks_of_dropout_are_the_exact_ones(tmp_path: Path) -> None:
    write_rows(tmp_path / "frontier-cost.csv", [Cost(task="cola", method="exact", kept=1, time=1.0)])

    def text(*masks: str) -> str:
        rows = [replace(epoch("exact", seed, 0.5), dropout=mask) for seed, mask in enumerate(masks)]
        write_rows(tmp_path / "frontier-accuracy.csv", [*rows, replace(epoch("tenth", 0, 0.5), dropout=masks[0])])
        return page.page(tmp_path)

    assert "- Methods that draw random numbers have masks of dropout of their own" in text("", "")
    assert "in every step on CoLA (seed 0). In other runs, methods that draw" in text("by step", "")
    assert "Runs of one seed have the same masks of dropout in every step.\n" in text("by step", "by step")
