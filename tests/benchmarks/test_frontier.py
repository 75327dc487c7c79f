"""The comparison of methods in training: runs are written one by one and go on where they stopped."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from frontier_helpers import run
from transformers import TrainerControl, TrainerState, TrainingArguments

from benchmarks.__main__ import main
from benchmarks.frontier import cost
from benchmarks.frontier.methods import METHODS
from benchmarks.frontier.rows import Cost, Epoch, Noisy, Point
from benchmarks.frontier.runs import in_turn
from benchmarks.frontier.shares import Share
from benchmarks.frontier.tasks import TRAININGS, SameDropout, SameOrder, score_of, train
from benchmarks.processes import ProcessError
from benchmarks.records import read_rows, write_rows
from rmm_linear.planning.offload import pack

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:transformers"),
    pytest.mark.usefixtures("in_this_process"),
]


def test_answers_that_are_all_the_same_score_0_and_a_lost_run_nothing() -> None:
    assert (score_of(0.5, 1.0), score_of(math.nan, 1.0)) == (0.5, 0.0)
    assert math.isnan(score_of(math.nan, math.nan))


@pytest.mark.thorough
def test_cost_and_accuracy_go_on_with_every_kind_of_method(
    places: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "SMALL", 1024)  # inputs of blocks are small here, too
    methods = ["exact", "checkpoint", "checkpoint-offload", "tenth"]
    run(places, tmp_path, "--parts", "cost", "accuracy", "--methods", *methods, "--seeds", "0")
    costs = {row.method: row for row in read_rows(tmp_path / "frontier-cost.csv", Cost)}
    exact = costs["exact"]
    assert (list(costs), exact.time) == (methods, 1)
    assert exact.kept == pytest.approx(exact.saved, rel=0.05)
    assert {method for method, row in costs.items() if row.saved is None} == {"checkpoint", "checkpoint-offload"}
    assert {method for method, row in costs.items() if row.host} == {"checkpoint-offload"}
    for method in methods[1:]:
        assert (costs[method].kept or 0) < 0.6 * (exact.kept or 0)
        assert (costs[method].peak or 0) < (exact.peak or 0)
    rows = read_rows(tmp_path / "frontier-accuracy.csv", Epoch)
    # Gradients of a checkpointed model are the exact ones: it is not trained again.
    assert [(row.method, row.epoch) for row in rows] == [(m, e) for m in ("exact", "tenth") for e in (1, 2)]
    assert all(row.settings == METHODS[row.method].settings() for row in rows)
    assert "all runs are there" in capsys.readouterr().out
    # Of another seed: only that one is run; of other settings: only these rows are replaced.
    path, first = tmp_path / "frontier-accuracy.csv", (tmp_path / "frontier-accuracy.csv").read_text()
    some = ["--parts", "accuracy", "--methods", "exact", "tenth"]
    run(places, tmp_path, *some, "--seeds", "0", "1", "--minutes", "0")
    assert "2 runs are left" in capsys.readouterr().out
    run(places, tmp_path, *some, "--seeds", "0", "1")
    assert capsys.readouterr().out.startswith("[3/4] cola, exact, 1: ")
    assert path.read_text().startswith(first)
    rows = read_rows(path, Epoch)
    assert len({row.train_loss for row in rows if row.epoch == 2}) == 4  # a seed gives a run
    changed = [replace(row, dropout="") if (row.method, row.seed) == ("tenth", 1) else row for row in rows]
    write_rows(path, changed)
    run(places, tmp_path, *some, "--seeds", "0", "1")
    assert capsys.readouterr().out.startswith("[4/4] cola, tenth, 1: ")
    assert [(row.train_loss, row.dropout) for row in read_rows(path, Epoch)] == [
        (r.train_loss, r.dropout) for r in rows
    ]


def test_a_run_that_fails_is_no_reason_to_stop_and_missing_plans_are_named(
    places: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(name: str, method: str, *others: Any) -> list[Epoch]:
        if method == "tenth":
            raise RuntimeError("first line\nout of luck")
        return train(name, method, *others)

    monkeypatch.setattr("benchmarks.frontier.tasks.train", fails)
    run(places, tmp_path, "--parts", "accuracy", "--methods", "tenth", "smallest", "fit-25", "--seeds", "0")
    printed = capsys.readouterr().out
    assert "cola, tenth, 0 failed: out of luck" in printed
    assert "[1/3] cola, smallest, 0: " in printed
    assert "cola, fit-25, 0: no plan, see part cost" in printed
    assert "2 runs are left, 1 of which failed" in printed
    monkeypatch.setitem(TRAININGS, "cola", replace(TRAININGS["cola"], methods=("exact",), seeds=(0,)))
    run(places, tmp_path / "other", "--parts", "accuracy", "--seeds", "1")
    assert "all runs are there" in capsys.readouterr().out  # the task has no such seed
    assert not (tmp_path / "other" / "frontier-accuracy.csv").exists()


@pytest.mark.thorough
def test_costs_go_on_where_they_stopped(
    places: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    some, path = ["--parts", "cost", "--methods", "exact", "smallest"], tmp_path / "frontier-cost.csv"

    def fails_in(name: str) -> Callable[..., Any]:
        def called(function: Callable[..., Any], *arguments: Any, timeout: float = 0.0) -> Any:
            if function.__name__ == name and "exact" not in arguments:
                raise ProcessError("first line\nout of luck")
            return function(*arguments)

        return called

    run(places, tmp_path, *some, "--minutes", "0")
    assert "not all measured yet" in capsys.readouterr().out
    monkeypatch.setattr(cost, "call", fails_in("_bytes"))
    run(places, tmp_path, *some)
    assert {row.method: row.status for row in read_rows(path, Cost)} == {"exact": "ok", "smallest": "out of luck"}
    assert "1 methods timed; without smallest: the same command tries again" in capsys.readouterr().out
    monkeypatch.setattr(cost, "call", fails_in("nothing"))
    run(places, tmp_path, *some)
    assert "2 methods timed" in capsys.readouterr().out
    # Another method at another commit: all rows are of that one, none is lost.
    run(places, tmp_path, "--parts", "cost", "--methods", "exact", "careful", "--commit", "abd")
    rows = read_rows(path, Cost)
    assert ({row.method for row in rows}, {row.commit for row in rows}) == ({"exact", "smallest", "careful"}, {"abd"})


def test_tasks_that_train_the_same_model_on_the_same_rows_have_one_set_of_costs() -> None:
    glue = ("sst2", "cola", "stsb", "rte")
    assert [task for task in TRAININGS if cost.has_costs(task)] == [
        f"{task}{end}" for end in ("", "-bf16") for task in glue
    ]


def test_runs_share_the_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert dict(in_turn([(3,), (5,)], lambda run: (pow, *run, 2), jobs=2, deadline=None)) == {(3,): 9, (5,): 25}
        assert dict(in_turn([(0,)], lambda _: (torch.get_num_threads,), jobs=2, deadline=None)) == {(0,): 1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tiny"], "--tiny needs --out FOLDER"),
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--data_dir", "nowhere"], "official GLUE layout; there is no nowhere"),
        (["--parts", "curves", "--wordnet", "nowhere"], "apt-get install wordnet-base"),
        (["--parts", "steps", "--studies", "experts", "--wordnet", "nowhere"], "apt-get install wordnet-base"),
    ],
)
def test_what_cannot_work_is_said_first(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontier", "--parts", "accuracy", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.thorough
def test_shares_of_a_step_and_products_in_them(tmp_path: Path) -> None:
    assert main(["frontier", "--parts", "shares", "--out", str(tmp_path), "--tiny", "--commit", "abc"]) == 0
    rows = read_rows(tmp_path / "frontier-shares.csv", Share)
    assert all(0 <= row.products < row.share < 1 and row.calls > 0 for row in rows)
    assert {row.operator for row in rows if row.products} > {"weight_gradient", "unpacked_product"}


@pytest.mark.thorough
def test_curves_of_models_from_scratch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"a {a} thing that is {b}" for a in ("red", "blue", "old", "new") for b in "abcdefgh"]
    for part in ("noun", "verb", "adj", "adv"):
        lines = 20 * [f"0 n | {text}; as {text}  " for text in words]
        (tmp_path / f"data.{part}").write_text("  1 the licence\n" + "\n".join(lines), encoding="utf-8")
    some = ["frontier", "--parts", "curves", "steps", "--wordnet", str(tmp_path), "--base_dir", str(tmp_path / "base")]
    some += ["--methods", "exact", "tenth", "dense-10", "lora", "lora-sketched", "qlora-tenth"]
    some += ["--seeds", "0", "--out", str(tmp_path), "--tiny", "--commit", "abc"]
    assert main(some) == 0
    points = read_rows(tmp_path / "frontier-curves.csv", Point)
    runs = {(row.study, row.method, row.batch) for row in points}
    assert {batch for study, method, batch in runs if (study, method) == ("language", "exact")} == {8, 7, 6, 4, 2, 1}
    assert {("base", "exact", 8), ("experts", "tenth", 8), ("adapters", "qlora-tenth", 8)} <= runs
    costs = {row.method: row for row in read_rows(tmp_path / "frontier-cost.csv", Cost) if row.task == "adapters"}
    assert (costs["qlora-tenth"].saved or 0) < (costs["lora-sketched"].saved or 0) < (costs["lora"].saved or 0)
    noises = read_rows(tmp_path / "frontier-noise.csv", Noisy)
    assert {row.method for row in noises if row.study == "adapters"} == {"lora-sketched", "qlora-tenth"}
    assert {"all", "linear", "norm", "activation", "attention"} <= {r.operation for r in noises if r.method == "tenth"}
    capsys.readouterr()
    assert main(some) == 0
    assert capsys.readouterr().out.splitlines()[0] == "all runs are there"


def test_the_order_of_rows_and_random_numbers_of_a_step_are_the_seeds_alone(tmp_path: Path) -> None:
    rows = [{"input_ids": [1] * (place % 7 + 1), "place": place} for place in range(64)]

    def orders(seed: int, drawn: int) -> list[list[int]]:
        settings = {"use_cpu": True, "per_device_train_batch_size": 4, "remove_unused_columns": False}
        trainer = SameOrder(
            model=torch.nn.Linear(1, 1),
            args=TrainingArguments(str(tmp_path), seed=seed, **settings),
            train_dataset=rows,  # pyright: ignore[reportArgumentType]
            data_collator=lambda batch: {"place": torch.tensor([row["place"] for row in batch])},
        )
        loader, found = trainer.get_train_dataloader(), list[list[int]]()
        for _ in range(2):
            found.append([int(place) for batch in loader for place in batch["place"]])
            torch.rand(drawn)  # what methods draw in a step
        return found

    def numbers(seed: int, step: int, drawn: int) -> tuple[float, ...]:
        torch.rand(drawn)
        arguments = TrainingArguments(str(tmp_path), seed=seed, use_cpu=True)
        SameDropout().on_step_begin(arguments, TrainerState(global_step=step), TrainerControl())
        return tuple(torch.rand(4).tolist())

    assert orders(0, 1) == orders(0, 5) != orders(1, 1)
    assert orders(0, 1)[0] != orders(0, 1)[1]
    assert numbers(0, 3, 1) == numbers(0, 3, 5)
    assert len({numbers(seed, step, 0) for seed in (0, 1, 2) for step in (0, 1, 2)}) == 9
