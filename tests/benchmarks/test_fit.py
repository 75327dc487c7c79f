"""Plans of fit: the command writes what it prints, single methods are what they are called, and pages follow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.fit_models import MODELS, recompute_segments, twin
from benchmarks.fit_rows import FIT, Fitted, Neighbour, Solved
from benchmarks.fit_steps import live_peak, step_of
from benchmarks.records import RESULTS, read_rows, write_rows

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:transformers")


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()


def command(out: Path, part: str) -> list[str]:
    arguments = ["fit", "--parts", part, "--models", "roberta", "--tiny", "--out", str(out), "--commit", "abc"]
    assert main(arguments) == 0
    return arguments


@pytest.mark.thorough
def test_plans_stand_beside_single_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    title = MODELS["roberta"][0]
    other = Fitted(model=MODELS["vit"][0], method="exact", measured=2, time=1.0)
    write_rows(tmp_path / "fit-frontier.csv", [other, Fitted(model=title, method="of before", measured=1)])
    command(tmp_path, "frontier")
    rows = read_rows(tmp_path / "fit-frontier.csv", Fitted)
    assert rows[-1] == other
    found = {row.method: row for row in rows if row.model == title and row.method != FIT}
    exact = found["exact"]
    single = ["recompute", "selective", "sketch", "pack", "convert tenth", "convert narrow", "offload"]
    parts = [f"{method} {part}" for method in single for part in ("all", "half")]
    assert list(found) == ["exact", *parts, "Chen et al., √n"]
    assert exact.time == 1
    assert all(row.commit == "abc" and (row.time or 0) > 0 for row in found.values())
    for method in ("recompute all", "selective all", "pack all", "convert tenth all", "Chen et al., √n"):
        assert exact.floor < (found[method].measured or 0) < 0.9 * (exact.measured or 0)
    assert (found["convert narrow all"].measured or 0) <= (found["convert tenth all"].measured or 0)
    for method in ("recompute", "pack", "convert narrow"):
        assert (found[f"{method} all"].measured or 0) < (found[f"{method} half"].measured or 0) < (exact.measured or 0)
    plans = [row for row in rows if row.method == FIT]
    assert [row.share for row in plans] == [0.5, 0.08]
    for row in plans:
        assert row.memory == row.floor + int((row.share or 0) * ((exact.measured or 0) - row.floor))
        assert row.status == "fits" or row.status.startswith("cannot fit: the least is")
    met = plans[0]
    assert met.status == "fits"
    assert met.floor < (met.measured or 0) <= (met.memory or 0)
    assert met.predicted_error == pytest.approx(100 * ((met.predicted or 0) / (met.measured or 1) - 1), rel=1e-4)
    rivals = [row for row in found.values() if (row.measured or 0) <= (met.memory or 0)]
    assert met.rival == min(rivals, key=lambda row: row.time or 0).method
    assert met.rival_time == found[met.rival].time
    assert (tmp_path / "fit-frontier.png").stat().st_size > 20_000
    assert met.plan in capsys.readouterr().out


@pytest.mark.thorough
def test_plans_stand_beside_what_pytorch_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(tmp_path, "neighbours")
    rows = read_rows(tmp_path / "fit-neighbours.csv", Neighbour)
    theirs = {row.method: row for row in rows if row.method != FIT}
    whole, exact = theirs["torch.utils.checkpoint, 3 of 3 blocks"], theirs["exact"]
    selective, copied = theirs["selective checkpoint, products kept"], theirs["save_on_cpu"]
    compiled = theirs["torch.compile (aot_eager), budget 0.1"]
    assert {row.status for row in theirs.values()} == {"ok"}
    assert (whole.live or 0) < (selective.live or 0) < (exact.live or 0) < (copied.live or 0)
    assert compiled.live is None
    assert (compiled.allocated or 0) < (exact.allocated or 0)
    ours = {row.beside: row for row in rows if row.method == FIT}
    assert set(ours) == {whole.method, selective.method, compiled.method}
    for method, row in ours.items():
        assert row.live is None or row.live <= (row.memory or 0)
        assert row.memory == (theirs[method].live or row.memory)
    assert ours[selective.method].status == "ok"
    assert ours[selective.method].plan in capsys.readouterr().out


def test_solvers_have_a_line_for_every_budget(tmp_path: Path) -> None:
    command(tmp_path, "solvers")
    rows = read_rows(tmp_path / "fit-solvers.csv", Solved)
    assert [row.solver for row in rows[:2]] == ["milp", "rounded"]
    assert len(rows) == 4
    for row in rows:
        assert row.cost is None or row.cost >= 1


@pytest.mark.parametrize("name", MODELS)
def test_segments_recompute_the_same_gradients_in_less_memory(name: str) -> None:
    model, batch = MODELS[name][1](True)
    other = twin(model)
    recompute_segments(other)
    found, peaks = [], []
    for each in (model, other):
        torch.manual_seed(0)
        step_of(each, batch)()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        peaks.append(live_peak(model, step_of(each, batch)))
    assert len(found[0]) == len(found[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert peaks[1] < 0.9 * peaks[0]


def test_plans_that_are_published_fit_and_were_predicted() -> None:
    rows = read_rows(RESULTS / "fit-frontier.csv", Fitted)
    assert {row.model for row in rows} == {title for title, _ in MODELS.values()}
    plans = [row for row in rows if row.method == FIT and row.measured is not None]
    assert plans
    for row in plans:
        assert row.status == "fits"
        assert (row.measured or 0) <= (row.memory or 0)
        assert abs(row.predicted_error or 0) <= 3
        assert abs(row.simulated_error or 0) <= 3
