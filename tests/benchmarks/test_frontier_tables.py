"""Tables of the comparison, of rows whose means are known."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.frontier import noise_page, page, summary
from benchmarks.frontier.compared import score_text, tasks_of
from benchmarks.frontier.curve_tables import reached, through_training
from benchmarks.frontier.means import mean_over_groups
from benchmarks.frontier.predictions import prediction_sections
from benchmarks.frontier.rows import Cost, Epoch, Noisy, Point
from benchmarks.records import write_rows
from rmm_linear.variance import effective_batch

LOSSES = {8: 2.0, 4: 3.0, 2: 4.0}


def epoch(method: str, seed: int, score: float, task: str = "cola", number: int = 2, **more: float) -> Epoch:
    return Epoch(
        task=task, method=method, seed=seed, epoch=number, epochs=2, metric="m", score=score, dev_loss=1.0,
        train_loss=1.0, steps=1, seconds=1.0, batch=32, learning_rate=1e-4, rows=9, settings="", **more,
    )  # fmt: skip


def point(method: str, batch: int, loss: float, seed: int = 0, step: int = 100, epoch: float = 0.9) -> Point:
    return Point(
        study="language", method=method, seed=seed, batch=batch, step=step, steps=200, epoch=epoch, train_loss=loss,
        dev_loss=loss, metric="m", score=0.5, seconds=1.0, learning_rate=1e-3, settings="",
    )  # fmt: skip


def noisy(noise: float, step: int = 50, block: str = "layers.0", operation: str = "all") -> Noisy:
    here = {"study": "language", "method": "tenth", "seed": 0, "batch": 8, "step": step}
    return Noisy(**here, operation=operation, block=block, noise=noise, sgd=2.0)


def cells(text: str, start: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {start}"))
    return [cell.strip() for cell in line.split("|")[1:-1]]


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
    assert "Means over CoLA, of up to 2 seeds; without a score, runs are not there yet." in first
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


def test_long_runs_have_a_line_per_epoch(tmp_path: Path) -> None:
    rows = [
        replace(
            epoch(method, seed, 0.1 * (number + 2 * seed + extra), "cola-long", number),
            fitted_loss=1.0 / number + seed + 0.5 * extra * seed,
            train_loss=2.0 / number + extra * (seed - 1.5),
        )
        for extra, method in enumerate(("exact", "tenth"))
        for seed in (0, 1)
        for number in (1, 2)
    ]
    write_rows(tmp_path / "frontier-accuracy.csv", rows)
    text = noise_page.noise_page(tmp_path)
    apart = ["−1.0000 ± 0.5000", "+0.2500 ± 0.2500", "+10.0 ± 0.0"]
    assert cells(text, "1 ") == ["1", "2.0000 ± 0.0000", "1.5000 ± 0.5000", "20.0 ± 10.0", *apart]
    assert cells(text, "2 ") == ["2", "1.0000 ± 0.0000", "1.0000 ± 0.5000", "30.0 ± 10.0", *apart]
    assert "published learning rate" not in text
    slow = [replace(row, task="cola-slow", score=0.07) for row in rows if row.seed == 0]
    write_rows(tmp_path / "frontier-accuracy.csv", rows + slow)
    text = noise_page.noise_page(tmp_path)
    assert cells(text[text.index("published learning rate") :], "2 ") == [
        "2", "1.0000", "0.5000", "7.0", "−1.5000", "+0.0000", "+0.0"
    ]  # fmt: skip


def test_long_runs_without_an_exact_run_of_their_seed_have_no_difference(tmp_path: Path) -> None:
    rows = [epoch(method, seed, 0.1, "cola-long", 1, fitted_loss=1.0) for method, seed in (("exact", 0), ("tenth", 1))]
    write_rows(tmp_path / "frontier-accuracy.csv", rows)
    assert cells(noise_page.noise_page(tmp_path), "1 ") == ["1", "1.0000", "1.0000", "10.0", "", "", ""]


def test_curves_end_in_means_and_differences_to_the_same_seed() -> None:
    ends = [point("exact", 8, 2.0, 0, 200), point("exact", 8, 4.0, 1, 200), point("exact", 4, 9.0, 0, 200)]
    ends += [point("tenth", 8, 2.5, 0, 200), point("tenth", 8, 4.7, 1, 200), point("tenth", 8, 9.9, 0, 100)]
    text = reached(ends)
    found = [line for line in text.splitlines() if "ours, default" in line]
    assert len(found) == 1
    assert [cell.strip() for cell in found[0].split("|")[3:-1]] == [
        "3.6000 ± 1.1000", "3.6000 ± 1.1000", "+0.6000 ± 0.1000", "50.00 ± 0.00", "", "2"
    ]  # fmt: skip


def test_the_page_describes_what_is_there_and_names_what_is_not(tmp_path: Path) -> None:
    assert noise_page.noise_page(tmp_path) == page.NOTHING
    images = replace(point("exact", 64, 2.0, 0, 200), study="images")
    write_rows(tmp_path / "frontier-curves.csv", [images])
    text = noise_page.noise_page(tmp_path)
    assert "Trained from scratch: a vision transformer" in text
    assert "Not measured yet: ten epochs of CoLA, LLaMA on glosses." in text
    write_rows(tmp_path / "frontier-curves.csv", [images, point("exact", 8, 2.0, 0, 200)])
    write_rows(tmp_path / "frontier-accuracy.csv", [epoch("exact", 0, 0.1, "cola-long", fitted_loss=1.0)])
    text = noise_page.noise_page(tmp_path)
    assert "Trained from scratch: a LLaMA" in text
    assert "seen twice; a vision transformer" in text
    assert "Not measured yet" not in text


@pytest.mark.parametrize(
    ("loss", "found", "off"),
    [(1.9, "≥ 8", ()), (2.5, "5.7", (32**0.5,)), (3.0, "4.0", (4,)), (3.5, "2.8", (8**0.5,)), (4.1, "< 2", ())],
)
def test_the_batch_found_lies_between_those_that_were_run(loss: float, found: str, off: tuple[float, ...]) -> None:
    points = [point("exact", size, value) for size, value in LOSSES.items()] + [point("tenth", 8, loss)]
    # Rows that were seen before make another comparison, and noise after that is none of it.
    points += [point("exact", 8, 0.1, step=200, epoch=1.8), point("tenth", 8, 0.1, step=200, epoch=1.8)]
    # Another seed, whose exact runs are all lower by one.
    points += [point("exact", size, value - 1, seed=1) for size, value in LOSSES.items()]
    points += [point("tenth", 8, 2.0, seed=1)]
    noises = [noisy(1.0), noisy(3.0, block="layers.1"), noisy(0.0, block="head"), noisy(99.0, step=150)]
    noises += [replace(row, seed=1) for row in noises]
    # One with hardly any noise is none to judge predictions by.
    points.append(point("wide", 8, 2.5))
    noises.append(replace(noisy(0.001), method="wide"))
    text = "\n".join(prediction_sections(points, noises))
    line = cells(text, "LLaMA")
    # Of the whole (1 + 3 + 0) / 6, of the median block 1 / 2.
    predicted = effective_batch(8, 4 / 6), effective_batch(8, 0.5)
    assert line[2:4] == ["0.67 / 0.5", f"{predicted[0]:.1f} / {predicted[1]:.1f}"]
    assert line[4] == f"{found}, 4.0"
    ratios = [sorted(one / batch for batch in (4, *off)) for one in predicted]
    assert line[5] == " / ".join(" to ".join(dict.fromkeys(f"{one:.2g}" for one in (r[0], r[-1]))) for r in ratios)
    rest = text[text.index("Exact training:") :]
    assert [cells(rest, f"LLaMA on glosses | 100  | {size} ")[3] for size in (2, 4, 8)] == [
        f"{mean:.4f} ± 0.5000" for mean in (3.5, 2.5, 1.5)
    ]
    assert f"{1 + len(off)} of 3 runs have at least 1 % of the minibatch's noise" in text
    worst = max(max(ratio, 1 / ratio) for ratio in ratios[0])
    assert f"off by a factor of up to {worst:.1f}; by the noise of the median block" in text
    assert prediction_sections([one for one in points if one.batch == 8], noises) == []


def test_without_a_batch_between_there_is_nothing_to_compare() -> None:
    points = [point("exact", size, value) for size, value in LOSSES.items()] + [point("tenth", 8, 1.0)]
    text = "\n".join(prediction_sections(points, [noisy(1.0)]))
    assert "≥ 8" in text
    assert "nothing to compare a prediction with" in text


def test_noise_is_by_depth_and_operation() -> None:
    rows = [noisy(step / 100, step, f"layers.{depth}") for step in (10, 50) for depth in (0, 1, 2)]
    rows += [noisy(0.5, step, f"layers.{depth}", "norm") for step in (10, 50) for depth in (0, 1, 2)]
    rows += [noisy(0.0, step, "head", operation) for step in (10, 50) for operation in ("all", "norm")]
    rows += [replace(row, seed=1) for row in rows]
    lines = [line.split("|")[2:-1] for line in through_training(rows).splitlines()[2:]]
    found = [tuple(cell.strip() for cell in line) for line in lines]
    layers, whole = [f"layers.{depth}" for depth in (0, 1, 2)], "whole gradient"
    assert found == [
        *(("all", layer, "0.05", "0.25") for layer in layers),
        ("all", whole, "0.037", "0.19"),
        *(("norm", layer, "0.25", "0.25") for layer in layers[::2]),
        ("norm", whole, "0.19", "0.19"),
        *(("D²_SGD", layer, "2", "2") for layer in layers),
        ("D²_SGD", whole, "8", "8"),
    ]
