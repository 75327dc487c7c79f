"""The comparison of methods in training: runs are written one by one and go on where they stopped."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import pytest
import torch
from frontier_helpers import run
from transformers import TrainerControl, TrainerState, TrainingArguments

from benchmarks.__main__ import main
from benchmarks.frontier import command
from benchmarks.frontier.cost import plan_path
from benchmarks.frontier.methods import METHODS
from benchmarks.frontier.rows import Cost, Epoch, Noisy, Point
from benchmarks.frontier.runs import in_turn
from benchmarks.frontier.shares import REST, Share, Spent, shares_of
from benchmarks.frontier.tasks import TRAININGS, prepare
from benchmarks.frontier.training import SameDropout, SameOrder
from benchmarks.records import read_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:transformers"),
    pytest.mark.usefixtures("in_this_process"),
]


@pytest.mark.parametrize(
    "methods",
    [
        ["exact", "checkpoint", "gact", "tenth"],
        pytest.param(
            ["exact", "checkpoint", "gact", "wta-30", "lora", "tenth", "fit-50"], marks=pytest.mark.thorough, id="more"
        ),
    ],
)
def test_cost_and_accuracy_of_every_kind_of_method(
    places: list[str], tmp_path: Path, methods: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(places, tmp_path, "--parts", "cost", "accuracy", "--methods", *methods, "--seeds", "0")
    costs = {row.method: row for row in read_rows(tmp_path / "frontier-cost.csv", Cost)}
    assert list(costs) == methods
    exact = costs["exact"]
    assert exact.time == 1
    assert exact.saved is not None
    assert exact.kept is not None
    assert exact.peak is not None
    # The loss and the logits live and are not saved; the batch is saved and was there before.
    assert exact.kept == pytest.approx(exact.saved, rel=0.05)
    without = {method for method, row in costs.items() if row.saved is None}
    assert {"checkpoint", "gact"} <= without <= {"checkpoint", "gact", "fit-50"}  # whose blocks may be recomputed
    for method in ("checkpoint", "gact", "tenth"):
        assert (costs[method].kept or 0) < 0.6 * exact.kept
        assert (costs[method].peak or 0) < exact.peak
    if "fit-50" in methods:
        assert costs["fit-50"].status == "ok"
        assert plan_path(tmp_path, "cola", "fit-50").is_file()
        assert costs["fit-50"].plan
    rows = read_rows(tmp_path / "frontier-accuracy.csv", Epoch)

    def path(method: str) -> Path:
        return plan_path(tmp_path, "cola", method)

    # Gradients of a checkpointed model are the exact ones: it is not trained again.
    assert [(row.method, row.epoch) for row in rows] == [(m, e) for m in methods if m != "checkpoint" for e in (1, 2)]
    assert all(row.commit == "abc" and row.steps == 3 * row.epoch and row.epochs == 2 for row in rows)
    assert all(row.learning_rate == METHODS[row.method].learning_rate for row in rows)
    assert all(row.settings == METHODS[row.method].settings(path(row.method)) for row in rows)
    assert all((row.lower or 1) <= (row.seconds or 0) <= (row.upper or 0) for row in costs.values())
    assert "all runs are there" in capsys.readouterr().out


def test_runs_share_the_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = dict(in_turn([3, 5, 7], lambda number: (pow, number, 2), jobs=2, deadline=None))
        assert torch.get_num_threads() == 2
        inside = dict(in_turn([0], lambda _: (torch.get_num_threads,), jobs=2, deadline=None))
    finally:
        torch.set_num_threads(threads)
    assert found == {3: 9, 5: 25, 7: 49}
    assert inside == {0: 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tiny"], "--tiny needs --out FOLDER"),
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--data_dir", "nowhere"], "official GLUE layout; there is no nowhere"),
    ],
)
def test_what_cannot_work_is_said_first(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontier", "--parts", "accuracy", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_shares_of_a_step_and_products_in_them(tmp_path: Path) -> None:
    assert main(["frontier", "--parts", "shares", "--out", str(tmp_path), "--tiny", "--commit", "abc"]) == 0
    rows = read_rows(tmp_path / "frontier-shares.csv", Share)
    for case in {row.case for row in rows}:
        here = {(row.phase, row.operator): row for row in rows if row.case == case}
        assert all(0 <= row.products < row.share < 1 and row.calls > 0 for row in here.values())
        if "Gaussian" in case:
            named = {
                ("forward", "draw_s"),
                ("forward", "sketch_x"),
                ("backward", "draw_s"),
                ("backward", "sketch_y"),
                ("backward", "weight_gradient"),
            }
            assert here.keys() == named | {("", REST)}
            assert here["forward", "draw_s"].products == 0
            assert here["forward", "sketch_x"].products == here["backward", "sketch_y"].products == 0
            assert here["backward", "weight_gradient"].products > 0
            continue
        assert ("forward", "keep") in here
        if "not packed" in case:
            assert here.keys() == {("forward", "keep"), ("backward", "sketch"), ("", REST)}
            continue
        assert ("forward", "pack_norm") in here
        assert here["backward", "unpacked_product"].products > 0  # dW itself
    assert len({row.case for row in rows}) == 5
    assert {row.products for row in rows if row.operator == "pack_derivative"} == {0.0}
    assert (tmp_path / "frontier-shares.png").stat().st_size > 5_000
    written = (tmp_path / "frontier-shares.csv").read_text()
    assert main(["frontier", "--parts", "shares", "--out", str(tmp_path), "--tiny", "--commit", "abd"]) == 0
    assert (tmp_path / "frontier-shares.csv").read_text() == written  # not measured again


def test_shares_are_medians_over_steps_by_the_median_step() -> None:
    key, rest = ("forward", "keep"), ("", "the rest")
    steps = [
        {key: Spent(2.0, 4, 1.0), rest: Spent(6.0)},
        {key: Spent(3.0, 4, 1.0), rest: Spent(7.0)},
        {rest: Spent(99.0)},
    ]
    keep, left = shares_of("case", steps)
    assert (keep.operator, keep.calls, keep.seconds, keep.share, keep.products) == ("keep", 4, 2.0, 0.2, 0.1)
    assert (left.operator, left.seconds, left.share) == ("the rest", 8.0, 0.8)


def test_the_command_knows_all_tasks() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    known = parser.parse_args(["--tasks", *TRAININGS])
    assert {*known.tasks} == {*TRAININGS}
    assert known.seeds == [0, 1, 2]


def test_curves_of_models_from_scratch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    glosses = tmp_path / "wordnet"
    glosses.mkdir()
    lines = [
        f'0 n | a {a} thing that is {b}; "as {b} as {a}"  ' for a in ["red", "blue", "old", "new"] for b in "abcdefgh"
    ]
    for part in ("noun", "verb", "adj", "adv"):
        (glosses / f"data.{part}").write_text("  1 the licence\n" + "\n".join(20 * lines), encoding="utf-8")
    some = ["frontier", "--parts", "curves", "--wordnet", str(glosses), "--methods", "exact", "tenth", "dense-10"]
    some += ["--seeds", "0", "--out", str(tmp_path), "--tiny", "--commit", "abc"]
    assert main(some) == 0
    points = read_rows(tmp_path / "frontier-curves.csv", Point)
    runs = {(row.study, row.method, row.batch) for row in points}
    assert {batch for study, method, batch in runs if (study, method) == ("language", "exact")} == {8, 7, 6, 4, 2, 1}
    assert {batch for study, _, batch in runs if study == "images"} == {64}
    assert {(study, method) for study, method, _ in runs} == {
        (study, method) for study in ("images", "language") for method in ("exact", "tenth", "dense-10")
    }
    assert all(0 < row.score < 1 and row.train_loss > 0 for row in points)
    noises = read_rows(tmp_path / "frontier-noise.csv", Noisy)
    assert {row.method for row in noises} == {"tenth", "dense-10"}
    of_tenth = {row.operation for row in noises if row.method == "tenth" and row.study == "images"}
    assert {"all", "linear", "norm", "activation", "attention"} <= of_tenth
    assert {row.operation for row in noises if row.method == "dense-10"} == {"all", "linear"}
    # The published sketch is the noisier one.
    total = {
        method: sum(row.noise for row in noises if (row.method, row.operation, row.study) == (method, "all", "images"))
        for method in ("tenth", "dense-10")
    }
    assert total["dense-10"] > 2 * total["tenth"]
    capsys.readouterr()
    assert main(some) == 0
    assert capsys.readouterr().out.splitlines() == ["all runs are there", str(tmp_path / "frontier-curves.png")]
    assert main([*some, "--wordnet", str(tmp_path / "nowhere")]) == 2
    assert "apt-get install wordnet-base" in capsys.readouterr().err


def test_the_order_of_rows_is_the_seeds_alone(tmp_path: Path) -> None:
    rows = [{"input_ids": [1] * (place % 7 + 1)} for place in range(64)]

    rows = [row | {"place": place} for place, row in enumerate(rows)]

    def orders(seed: int, drawn: int) -> list[list[int]]:
        settings = TrainingArguments(
            str(tmp_path), seed=seed, use_cpu=True, per_device_train_batch_size=4, remove_unused_columns=False
        )
        trainer = SameOrder(
            model=torch.nn.Linear(1, 1),
            args=settings,
            train_dataset=rows,  # pyright: ignore[reportArgumentType]
            data_collator=lambda batch: {"place": torch.tensor([row["place"] for row in batch])},
        )
        loader, found = trainer.get_train_dataloader(), list[list[int]]()
        for _ in range(2):
            found.append([int(place) for batch in loader for place in batch["place"]])
            torch.rand(drawn)  # what methods draw in a step
        return found

    assert orders(0, 1) == orders(0, 5)
    assert sorted(orders(0, 1)[0]) == list(range(64))
    assert orders(0, 1)[0] != orders(0, 1)[1]
    assert orders(0, 1) != orders(1, 1)


def test_random_numbers_of_a_step_are_the_seeds_and_the_steps_alone(tmp_path: Path) -> None:
    def numbers(seed: int, step: int, drawn: int) -> list[float]:
        torch.rand(drawn)  # what methods draw in the steps before
        arguments = TrainingArguments(str(tmp_path), seed=seed, use_cpu=True)
        SameDropout().on_step_begin(arguments, TrainerState(global_step=step), TrainerControl())
        return torch.rand(4).tolist()

    assert numbers(0, 3, 1) == numbers(0, 3, 5)
    assert len({tuple(numbers(seed, step, 0)) for seed in (0, 1, 2) for step in (0, 1, 2)}) == 9


def test_batches_whose_costs_are_measured_have_no_padding(places: list[str]) -> None:
    ready = prepare("cola", places[1], places[3], tiny=True)
    lengths = [len(ids) for ids in ready.rows["input_ids"]]
    median = statistics.median_low(lengths)
    assert lengths.count(median) > 4
    batch = ready.batch(ready.model(0), count=4)
    assert batch["input_ids"].shape == (4, median)
    assert batch["attention_mask"].all()
    # About 2,048 tokens are more than the few rows here have of that length: then it is all of those.
    assert ready.batch(ready.model(0))["input_ids"].shape == (min(2048 // median, lengths.count(median)), median)
