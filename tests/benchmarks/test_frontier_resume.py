"""The comparison of methods in training goes on where it stopped: after its time, a failure, other settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from frontier_helpers import run

from benchmarks.frontier import cost
from benchmarks.frontier.cost import plan_path
from benchmarks.frontier.rows import Cost, Epoch
from benchmarks.frontier.tasks import TRAININGS
from benchmarks.frontier.training import train
from benchmarks.processes import ProcessError
from benchmarks.records import put_rows, read_rows, write_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:transformers"),
    pytest.mark.usefixtures("in_this_process"),
]


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


@pytest.mark.parametrize("other", [{"settings": "other"}, {"dropout": ""}], ids=str)
def test_a_run_with_other_settings_is_run_again_and_replaced(
    other: dict[str, str], places: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = ["--parts", "accuracy", "--methods", "exact", "tenth", "--seeds", "0"]
    run(places, tmp_path, *some)
    path = tmp_path / "frontier-accuracy.csv"
    rows = read_rows(path, Epoch)
    write_rows(path, [replace(row, **other) if row.method == "tenth" else row for row in rows])
    capsys.readouterr()
    run(places, tmp_path, *some)
    printed = capsys.readouterr().out
    assert "cola, tenth, 0" in printed
    assert "cola, exact, 0" not in printed
    again = read_rows(path, Epoch)
    assert [(row.method, row.epoch, row.settings, row.dropout, row.score) for row in again] == [
        (row.method, row.epoch, row.settings, "by step", row.score) for row in rows
    ]


def test_only_seeds_of_a_task_are_run(
    places: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRAININGS, "cola", replace(TRAININGS["cola"], methods=("exact", "tenth"), seeds=(0,)))
    run(places, tmp_path, "--parts", "accuracy", "--seeds", "0", "1", "--minutes", "0")
    assert "2 runs are left" in capsys.readouterr().out
    run(places, tmp_path, "--parts", "accuracy", "--seeds", "1")
    assert "all runs are there" in capsys.readouterr().out
    assert not (tmp_path / "frontier-accuracy.csv").exists()


def test_costs_go_on_where_they_stopped(
    places: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    some, path = ["--parts", "cost", "--methods", "exact", "narrow"], tmp_path / "frontier-cost.csv"

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
    assert {row.method: row.status for row in read_rows(path, Cost)} == {"exact": "ok", "narrow": "out of luck"}
    assert "1 methods timed; without narrow: the same command tries again" in capsys.readouterr().out
    monkeypatch.setattr(cost, "call", fails_in("_seconds"))
    run(places, tmp_path, *some)
    assert "no times, out of luck" in capsys.readouterr().out
    assert {row.method: row.seconds is None for row in read_rows(path, Cost)} == {"exact": False, "narrow": True}
    monkeypatch.setattr(cost, "call", fails_in("nothing"))
    run(places, tmp_path, *some)
    printed = capsys.readouterr().out
    assert "2 methods timed" in printed
    assert "kept" not in printed  # bytes are there
    whole = path.read_text()
    run(places, tmp_path, *some)
    assert "cola: all costs are there" in capsys.readouterr().out
    assert path.read_text() == whole
    monkeypatch.setattr(cost, "_measured", lambda *_: {"status": "no"})
    run(places, tmp_path / "other", *some)
    assert "no times, for want of the exact step's" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(cost, "call", fails_in("nothing"))
    monkeypatch.setattr(cost, "give_back", lambda: None)
    # Another method at another commit: all rows are of that one, none is lost.
    run(places, tmp_path, "--parts", "cost", "--methods", "exact", "wide", "--commit", "abd")
    rows = read_rows(path, Cost)
    assert {row.method for row in rows} == {"exact", "narrow", "wide"}
    assert {row.commit for row in rows} == {"abd"}
    assert {row.method: row.time for row in rows}["exact"] == 1


def test_plans_that_are_missing_are_named(
    places: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(places, tmp_path, "--parts", "accuracy", "--methods", "fit-25", "--seeds", "0")
    printed = capsys.readouterr().out
    assert "cola, fit-25, 0: no plan, see part cost" in printed


def test_rows_that_another_command_wrote_meanwhile_stay(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    put_rows(path, [Cost(task="cola", method="exact")], lambda row: False)
    write_rows(path, [Cost(task="cola", method="exact"), Cost(task="sst2", method="exact")])  # the other
    put_rows(path, [Cost(task="cola", method="exact", saved=1)], lambda row: row.task == "cola")
    assert [(row.task, row.saved) for row in read_rows(path, Cost)] == [("sst2", None), ("cola", 1)]


def test_a_plan_that_is_there_is_kept(places: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plan_path(tmp_path, "cola", "fit-50")
    path.parent.mkdir(parents=True)
    path.write_text("a plan that runs were trained with")
    monkeypatch.setattr(cost, "call", lambda *arguments, **options: pytest.fail("a plan was made again"))
    wanted = cost.Sized(["cola"], ["fit-50"], places[1], places[3], tmp_path, tiny=True)
    assert cost._plan(wanted, "cola", ["exact", "fit-50"]) == {}
    assert path.read_text() == "a plan that runs were trained with"
