"""--max_memory fits a run into a budget: what it records, how it resumes, and what it excludes."""

import signal

import pytest
from glue_helpers import SignalTimer, fails, flags, results_of, same_weights
from transformers import AutoModelForSequenceClassification

from glue_finetune import training
from glue_finetune.__main__ import main
from glue_finetune.flags import short_help
from rmm_linear.integrations.pretrained import convert_as_saved

# Of so few tokens that all batches have one shape: a larger one would be planned for again.
FIT = {"max_memory": "0.9", "min_rows": None, "max_seq_length": 8, "num_train_epochs": 2, "seed": 7}


@pytest.fixture(scope="module")
def fitted(model, cola, tmp_path_factory):
    output = tmp_path_factory.mktemp("fitted") / "run"
    assert main(flags(model, cola, output, **FIT)) == 0
    return output


def test_results_record_the_plan_and_its_peak(fitted):
    found = results_of(fitted)["fit"]
    assert found["summary"].startswith("rmm_linear fit: ")
    assert 0 < found["peak_bytes"] <= found["budget_bytes"] < found["exact_peak_bytes"]
    assert results_of(fitted)["settings"]["max_memory"] == "0.9"
    assert results_of(fitted)["memory"]["bytes_kept_for_backward"] > 0


def test_the_plan_is_saved_with_the_model(fitted):
    assert (fitted / "rmm_plan.json").is_file()
    loaded = AutoModelForSequenceClassification.from_pretrained(fitted)
    report = convert_as_saved(loaded, fitted)
    assert loaded.rmm_plan.is_applied
    assert [*report.converted] == results_of(fitted)["converted"]


@pytest.mark.thorough
def test_a_resumed_run_keeps_the_plan_and_ends_with_the_same_weights(model, cola, tmp_path, monkeypatch, capsys):
    """In a budget that the exact model fits, so that a plan is the same one each time it is made."""
    wide = {**FIT, "max_memory": "4GB"}
    assert main(flags(model, cola, tmp_path / "whole", **wide)) == 0
    bomb = type("Bomb", (SignalTimer,), {"step": 4, "evaluation": None, "signum": signal.SIGINT})
    with monkeypatch.context() as patch:
        patch.setattr(training, "StepTimer", bomb)
        assert main(flags(model, cola, tmp_path / "half", **wide)) == 130
    (checkpoint,) = (tmp_path / "half").glob("checkpoint-*")
    assert (checkpoint / "rmm_plan.json").is_file()
    capsys.readouterr()
    assert main(flags(model, cola, tmp_path / "half", **wide, resume_from_checkpoint="last")) == 0
    assert "(of the checkpoint)" in capsys.readouterr().out
    assert same_weights(tmp_path / "whole", tmp_path / "half")
    assert results_of(tmp_path / "half")["fit"] == results_of(tmp_path / "whole")["fit"]


@pytest.mark.thorough
def test_where_the_exact_model_fits_the_run_is_the_exact_one(model, cola, tmp_path):
    for name, more in (("exact", {"kind": "exact"}), ("fit", {"max_memory": "4GB"})):
        assert main(flags(model, cola, tmp_path / name, **{**FIT, "max_memory": None, "max_steps": 3, **more})) == 0
    assert same_weights(tmp_path / "exact", tmp_path / "fit")


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"kind": "gaussian"}, "got --kind too"),
        ({"kind": "exact"}, "got --kind too"),
        ({"ratio": 0.1}, "got --ratio too"),
        ({"probe_every": 2}, "got --probe_every too"),
        ({"compare": ["exact", "rows:0.1"]}, "got --compare too"),
        ({"max_memory": "8 gigs"}, "max_memory: memory must be a size, got '8 gigs'"),
        ({"max_memory": "1.5"}, "max_memory: memory as a share must be in"),
    ],
)
def test_what_does_not_go_with_it_is_refused_before_anything_is_written(model, cola, tmp_path, capsys, more, text):
    assert text in fails(capsys, flags(model, cola, tmp_path / "run", **{**FIT, **more}))
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_met_is_one_line(model, cola, tmp_path, capsys):
    argv = flags(model, cola, tmp_path / "run", **{**FIT, "max_memory": "1KB"})
    assert main(argv) == 2
    assert "memory='1KB' cannot be met" in capsys.readouterr().err


def test_the_help_has_it():
    assert "--max_memory" in short_help()
