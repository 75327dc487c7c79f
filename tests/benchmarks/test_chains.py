"""The benchmark of chains: what it counts agrees with plans, and the committed figures show what they must."""

import csv

import pytest
import torch

from benchmarks import chains
from benchmarks.__main__ import main
from benchmarks.chains_bptt import Run
from benchmarks.chains_costs import Cost, revolve
from benchmarks.chains_subsets import Subset
from benchmarks.records import RESULTS, ROOT, read_rows


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small run of the parts of this page."""
    out = tmp_path_factory.mktemp("chains")
    texts = list(chains.run(out, ["subsets", "costs", "bptt"], commit="abc", tiny=True))
    assert all(text.startswith("| ") for text in texts)
    return out


def test_the_command_runs_parts_by_name(tmp_path, capsys):
    assert main(["chains", "--parts", "costs", "--tiny", "--out", str(tmp_path), "--commit", "abc"]) == 0
    assert "| steps | policy |" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chains-costs.csv", "chains-costs.png"]


@pytest.mark.parametrize("folder", ["small", "committed"])
def test_steps_are_those_of_the_plan_and_gradients_those_of_the_loop(folder, small):
    rows = read_rows((small if folder == "small" else RESULTS) / "chains-bptt.csv", Run)
    assert {row.policy for row in rows} == {"plain", "states", "graphs", "both"}
    for row in rows:
        assert row.counted_steps == row.planned_steps, row
        if row.gradients != "equal":  # a GRU's parts of a gradient add up in another order
            assert row.cell == "GRU"
            assert float(row.gradients) < 1e-5


@pytest.mark.parametrize("folder", ["small", "committed"])
def test_kept_states_of_random_generators_are_part_of_the_peak(folder, small):
    rows = read_rows((small if folder == "small" else RESULTS) / "chains-bptt.csv", Run)
    found = {(row.cell, row.policy, row.budget): row for row in rows}
    kept = next(row.slots for row in rows if row.policy == "states")
    plain, dropping = (found[cell, "states", f"{kept} states"] for cell in ("LSTM", "LSTM, dropout"))
    assert dropping.recurrent_bytes - plain.recurrent_bytes >= kept * torch.get_rng_state().nbytes


@pytest.mark.parametrize("folder", ["small", "committed"])
def test_one_kind_of_slots_costs_what_the_closed_forms_say(folder, small):
    rows = read_rows((small if folder == "small" else RESULTS) / "chains-costs.csv", Cost)
    found = {(row.steps, row.policy, row.share): row for row in rows}
    for (steps, policy, share), row in found.items():
        assert row.least <= row.forward_steps <= 1.03 * row.least
        if policy == "states":
            assert row.forward_steps == revolve(steps, row.slots) == found[steps, "Revolve", share].forward_steps
        if policy == "both":  # it may do what either of the others does
            others = [found[steps, name, share] for name in ("states", "graphs") if (steps, name, share) in found]
            assert row.least <= min(other.forward_steps for other in others)


@pytest.mark.parametrize("folder", ["small", "committed"])
def test_subsets_save_what_they_predict(folder, small):
    rows = read_rows((small if folder == "small" else RESULTS) / "chains-subsets.csv", Subset)
    run = [row for row in rows if row.measured is not None]
    assert len(run) == 2
    for row in run:
        assert row.is_equal == "equal"
        # On top come what a module makes before its result, and a number per element of the loss.
        assert 0 < row.measured - row.peak <= 1.2 * 256 * 1024 * 4


def test_committed_figures_show_a_third_more_time_for_a_twentieth_of_the_memory():
    rows = {(row.cell, row.policy, row.budget): row for row in read_rows(RESULTS / "chains-bptt.csv", Run)}
    row = rows["LSTM", "graphs", "50 graphs, 5 %"]
    assert (row.steps, row.batch, row.hidden, row.planned_steps) == (1000, 16, 64, 1949)
    assert round(row.time_ratio, 2) == round((1.949 + 2) / 3, 2) == 1.32
    assert all(one.share <= 0.075 for one in rows.values() if one.policy != "plain" and one.cell == "LSTM")
    # 50 states of the random generator come on top, 5 KB each.
    assert all(one.share <= 0.08 for one in rows.values() if one.policy != "plain" and one.cell == "LSTM, dropout")


def test_figures_of_subsets_on_the_page_are_those_of_the_csv():
    rows = {(row.chain, row.outputs): row for row in read_rows(RESULTS / "chains-subsets.csv", Subset)}
    run, million = rows["linear and tanh", 201], rows["equal", 10**6]
    page = " ".join((ROOT / "docs" / "planning" / "chains.md").read_text(encoding="utf-8").split())
    share = f"{100 * run.measured / run.measured_everything:.0f} %"
    assert f"{run.kept} outputs of 201 are kept, and the peak is {share} of that" in page
    assert f"it would be {100 * million.peak / million.everything:.2f} %" in page


def test_every_committed_row_says_where_it_comes_from():
    for path in RESULTS.glob("chains-*.csv"):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                assert all(row[name] for name in ("machine", "torch", "python", "commit", "date")), path
                assert "dirty" not in row["commit"]
