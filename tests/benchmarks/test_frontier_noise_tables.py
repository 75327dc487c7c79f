"""Tables of training with noise, of rows whose means are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from frontier_helpers import cells, epoch, noisy, point

from benchmarks.frontier import noise_page, page
from benchmarks.frontier.curve_tables import reached, through_training
from benchmarks.frontier.predictions import prediction_sections
from benchmarks.records import write_rows
from rmm_linear.variance import effective_batch

LOSSES = {8: 2.0, 4: 3.0, 2: 4.0}


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
    assert "At the published" not in text
    slow = [replace(row, task="cola-slow", score=0.07) for row in rows if row.seed == 0]
    write_rows(tmp_path / "frontier-accuracy.csv", rows + slow)
    text = noise_page.noise_page(tmp_path)
    assert cells(text[text.index("At the published") :], "2 ") == [
        "2", "1.0000", "0.5000", "7.0", "−1.5000", "+0.0000", "+0.0"
    ]  # fmt: skip
    assert "At the published" in text
    assert "higher by a tenth" not in text
    raised = [replace(row, task="cola-raised", train_loss=row.train_loss + 1) for row in slow if row.method == "tenth"]
    write_rows(tmp_path / "frontier-accuracy.csv", rows + slow + raised)
    text = noise_page.noise_page(tmp_path)
    assert cells(text[text.index("higher by a tenth") :], "2 ") == [
        "2", "1.0000", "0.5000", "7.0", "−0.5000", "+0.0000", "+0.0"
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
    assert line[2:4] == ["0.67 / 0.5", " / ".join(f"{one:.1f}, {one:.1f}" for one in predicted)]
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
    rows = [noisy(step / 125, step, f"layers.{depth}") for step in (10, 50) for depth in (0, 1, 2)]
    rows += [noisy(0.5, step, f"layers.{depth}", "norm") for step in (10, 50) for depth in (0, 1, 2)]
    rows += [noisy(0.0, step, "head", operation) for step in (10, 50) for operation in ("all", "norm")]
    rows += [replace(row, seed=1) for row in rows]
    lines = [line.split("|")[2:-1] for line in through_training(rows).splitlines()[2:]]
    found = [tuple(cell.strip() for cell in line) for line in lines]
    layers, whole = [f"layers.{depth}" for depth in (0, 1, 2)], "whole gradient"
    assert found == [
        *(("all", layer, "0.04", "0.2") for layer in layers),
        ("all", whole, "0.03", "0.15"),
        *(("norm", layer, "0.25", "0.25") for layer in layers[::2]),
        ("norm", whole, "0.19", "0.19"),
        *(("D²_SGD", layer, "2", "2") for layer in layers),
        ("D²_SGD", whole, "8", "8"),
    ]
    # One seed has both ten times as large, and two fifths of the ratio: the median is the other two's.
    rows += [replace(row, seed=2, noise=4 * row.noise, sgd=10 * row.sgd) for row in rows if row.seed == 0]
    text = through_training(rows)
    assert cells(text, "LLaMA on glosses | all       | layers.0")[3:] == ["0.04 (0.016 to 0.04)", "0.2 (0.08 to 0.2)"]
    assert cells(text, "LLaMA on glosses | D²_SGD    | whole")[3:] == ["8", "8"]
    silent = through_training([replace(row, noise=0.0) for row in rows])
    assert cells(silent, "LLaMA on glosses | all       | layers.0")[3:] == ["0", "0"]  # no range of nothing
