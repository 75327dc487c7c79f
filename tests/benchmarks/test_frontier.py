"""The comparison of methods in training: runs are written one by one and go on where they stopped."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from glue_helpers import write_cola
from transformers import TrainingArguments

from benchmarks.__main__ import main
from benchmarks.frontier import command, cost
from benchmarks.frontier.cost import plan_path
from benchmarks.frontier.methods import METHODS
from benchmarks.frontier.rows import Cost, Epoch, Noisy, Point
from benchmarks.frontier.runs import in_turn
from benchmarks.frontier.shares import Share, Spent, shares_of
from benchmarks.frontier.tasks import TRAININGS, prepare
from benchmarks.frontier.training import SameOrder, train
from benchmarks.records import read_rows
from glue_finetune.acceptability import make_corpus
from glue_finetune.scratch import save_scratch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:transformers")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("frontier")
    texts = root / "texts.txt"
    texts.write_text("\n".join(example.text for example in make_corpus(100, 2)[0]), encoding="utf-8")
    save_scratch(root / "model", texts, width=32, heads=2)
    return ["--data_dir", str(write_cola(root, 96, 32)), "--model_dir", str(root / "model"), "--tasks", "cola"]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own have tests of their own."""
    for module in ("cost", "runs"):
        monkeypatch.setattr(f"benchmarks.frontier.{module}.call", lambda run, *arguments, timeout=0.0: run(*arguments))
    monkeypatch.setattr(cost, "give_back", lambda: None)  # it would slow all tests that follow


def run(places: list[str], out: Path, *arguments: str) -> None:
    assert main(["frontier", *places, "--out", str(out), "--tiny", "--commit", "abc", *arguments]) == 0


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
    # Gradients of a checkpointed model are the exact ones: it is not trained again.
    assert [(row.method, row.epoch) for row in rows] == [(m, e) for m in methods if m != "checkpoint" for e in (1, 2)]
    assert all(row.commit == "abc" and row.steps == 3 * row.epoch and row.epochs == 2 for row in rows)
    assert all(row.learning_rate == METHODS[row.method].learning_rate for row in rows)
    assert "all runs are there" in capsys.readouterr().out


def test_runs_go_on_where_they_stopped(places: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = ["--parts", "accuracy", "--methods", "exact", "tenth"]
    run(places, tmp_path, *some, "--seeds", "0", "1", "--minutes", "0")
    assert not (tmp_path / "frontier-accuracy.csv").exists()
    assert "4 runs are left" in capsys.readouterr().out
    run(places, tmp_path, *some, "--seeds", "0")
    first = (tmp_path / "frontier-accuracy.csv").read_text()
    capsys.readouterr()
    run(places, tmp_path, *some, "--seeds", "0", "1")
    printed = capsys.readouterr().out
    assert printed.startswith("[3/4] cola, exact, 1: ")
    assert (tmp_path / "frontier-accuracy.csv").read_text().startswith(first)
    rows = read_rows(tmp_path / "frontier-accuracy.csv", Epoch)
    assert len(rows) == 8
    # A seed gives a run: another method or another seed, another loss.
    assert len({row.train_loss for row in rows if row.epoch == 2}) == 4
    assert all(row.threads == torch.get_num_threads() for row in rows)
    run(places, tmp_path / "again", *some, "--seeds", "1", "--methods", "tenth")
    again = read_rows(tmp_path / "again" / "frontier-accuracy.csv", Epoch)
    assert [row.train_loss for row in again] == [r.train_loss for r in rows if (r.method, r.seed) == ("tenth", 1)]


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


def test_a_run_that_fails_is_no_reason_to_stop(
    places: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(name: str, method: str, *others: object) -> list[Epoch]:
        if method == "tenth":
            raise RuntimeError("first line\nout of luck")
        return train(name, method, *others)

    monkeypatch.setattr("benchmarks.frontier.accuracy.train", fails)
    run(places, tmp_path, "--parts", "accuracy", "--methods", "tenth", "narrow", "--seeds", "0")
    printed = capsys.readouterr().out
    assert "cola, tenth, 0 failed: out of luck" in printed
    assert "[1/2] cola, narrow, 0: " in printed
    assert "1 runs are left, 1 of which failed" in printed


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
        assert {("forward", "keep"), ("forward", "pack_norm")} <= here.keys()
        assert here["backward", "unpacked_product"].products > 0  # dW itself
    assert {row.products for row in rows if row.operator == "pack_derivative"} == {0.0}
    assert (tmp_path / "frontier-shares.png").stat().st_size > 5_000


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


def test_plans_that_are_missing_are_named(
    places: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(places, tmp_path, "--parts", "accuracy", "--methods", "fit-25", "--seeds", "0")
    printed = capsys.readouterr().out
    assert "cola, fit-25, 0: no plan, see part cost" in printed


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
    some = ["frontier", "--parts", "curves", "--wordnet", str(glosses), "--methods", "exact", "tenth", "gaussian-10"]
    some += ["--seeds", "0", "--out", str(tmp_path), "--tiny", "--commit", "abc"]
    assert main(some) == 0
    points = read_rows(tmp_path / "frontier-curves.csv", Point)
    runs = {(row.study, row.method, row.batch) for row in points}
    assert {batch for study, method, batch in runs if (study, method) == ("language", "exact")} == {8, 4, 2, 1}
    assert {batch for study, _, batch in runs if study == "images"} == {64}
    assert {(study, method) for study, method, _ in runs} == {
        (study, method) for study in ("images", "language") for method in ("exact", "tenth", "gaussian-10")
    }
    assert all(0 < row.score < 1 and row.train_loss > 0 for row in points)
    noises = read_rows(tmp_path / "frontier-noise.csv", Noisy)
    assert {row.method for row in noises} == {"tenth", "gaussian-10"}
    of_tenth = {row.operation for row in noises if row.method == "tenth" and row.study == "images"}
    assert {"all", "linear", "norm", "activation", "attention"} <= of_tenth
    assert {row.operation for row in noises if row.method == "gaussian-10"} == {"all", "linear"}
    # The published sketch is the noisier one.
    total = {
        method: sum(row.noise for row in noises if (row.method, row.operation, row.study) == (method, "all", "images"))
        for method in ("tenth", "gaussian-10")
    }
    assert total["gaussian-10"] > 2 * total["tenth"]
    capsys.readouterr()
    assert main(some) == 0
    assert capsys.readouterr().out.splitlines() == ["all runs are there", str(tmp_path / "frontier-curves.png")]
    assert main([*some, "--wordnet", str(tmp_path / "nowhere")]) == 2
    assert "apt-get install wordnet-base" in capsys.readouterr().err


def test_the_order_of_rows_is_the_seeds_alone(tmp_path: Path) -> None:
    rows = [{"input_ids": [1] * (place % 7 + 1)} for place in range(64)]

    def orders(seed: int, drawn: int) -> list[list[int]]:
        settings = TrainingArguments(str(tmp_path), seed=seed, use_cpu=True, per_device_train_batch_size=4)
        trainer = SameOrder(model=torch.nn.Linear(1, 1), args=settings, train_dataset=rows)  # pyright: ignore[reportArgumentType]
        sampler = trainer._get_train_sampler()
        first = list(sampler)
        torch.rand(drawn)  # what methods draw in a step
        return [first, list(sampler)]

    assert orders(0, 1) == orders(0, 5)
    assert sorted(orders(0, 1)[0]) == list(range(64))
    assert orders(0, 1)[0] != orders(0, 1)[1]
    assert orders(0, 1) != orders(1, 1)


def test_batches_whose_costs_are_measured_have_no_padding(places: list[str]) -> None:
    ready = prepare("cola", places[1], places[3], tiny=True)
    lengths = sorted(len(ids) for ids in ready.rows["input_ids"])
    batch = ready.batch(ready.model(0), count=16)
    assert batch["input_ids"].shape[0] == 16
    assert batch["input_ids"].shape[1] - lengths[len(lengths) // 2] <= 1
    assert batch["attention_mask"].float().mean() > 0.9
    tokens = ready.batch(ready.model(0))["input_ids"]
    assert len(tokens) == min(2048 // lengths[len(lengths) // 2], len(lengths))


def test_a_plan_that_is_there_is_kept(places: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plan_path(tmp_path, "cola", "fit-50")
    path.parent.mkdir(parents=True)
    path.write_text("a plan that runs were trained with")
    monkeypatch.setattr(cost, "call", lambda *arguments, **options: pytest.fail("a plan was made again"))
    assert cost._plan("cola", ["exact", "fit-50"], tmp_path, *places[1:4:2], tiny=True) == {}
    assert path.read_text() == "a plan that runs were trained with"
