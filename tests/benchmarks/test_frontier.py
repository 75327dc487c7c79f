"""The comparison of methods in training: runs are written one by one and go on where they stopped."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from glue_helpers import write_cola

from benchmarks.__main__ import main
from benchmarks.frontier import command
from benchmarks.frontier.cost import plan_path
from benchmarks.frontier.methods import METHODS
from benchmarks.frontier.rows import Cost, Epoch, Noisy, Point
from benchmarks.frontier.runs import in_turn
from benchmarks.frontier.shares import Share
from benchmarks.frontier.tasks import TRAININGS
from benchmarks.frontier.training import train
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


def test_shares_of_a_step_add_up(tmp_path: Path) -> None:
    assert main(["frontier", "--parts", "shares", "--out", str(tmp_path), "--tiny", "--commit", "abc"]) == 0
    rows = read_rows(tmp_path / "frontier-shares.csv", Share)
    for case in {row.case for row in rows}:
        here = [row for row in rows if row.case == case]
        assert sum(row.share for row in here) == pytest.approx(1)
        assert all(0 < row.share < 1 and row.calls > 0 for row in here)
        operators = {(row.phase, row.operator) for row in here}
        assert {("forward", "keep"), ("backward", "unpacked_product"), ("forward", "pack_norm")} <= operators
    assert (tmp_path / "frontier-shares.png").stat().st_size > 5_000


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
