"""--probe_every: variance.csv next to results.json, in every mode of the script."""

import signal

import pandas as pd
import pytest
from glue_helpers import SignalTimer, fails, flags, results_of, same_weights

from glue_finetune import compare, training
from glue_finetune.__main__ import main
from rmm_linear import RMMConfig
from rmm_linear.variance.probe.results import COLUMNS

SKETCH = {"kind": "gaussian", "ratio": 0.2, "seed": 7, "num_train_epochs": 1}


def table_of(folder):
    return pd.read_csv(folder / "variance.csv", float_precision="round_trip")


@pytest.fixture(scope="module")
def probed(model, cola, tmp_path_factory):
    output = tmp_path_factory.mktemp("probed") / "run"
    assert main(flags(model, cola, output, probe_every=2, **SKETCH)) == 0
    return output


def test_a_run_writes_its_noise(probed, model, cola, tmp_path):
    found, results = table_of(probed), results_of(probed)
    assert tuple(found.columns) == COLUMNS
    assert sorted(set(found.step)) == [2, 4, 6] == list(range(2, results["steps"] + 1, 2))
    assert set(found.module) == set(results["converted"])
    assert set(found.kind) == {"gaussian"}
    inner = found[~found.module.str.startswith("classifier")]
    assert (inner.rows == [max(4, round(0.2 * tokens)) for tokens in inner.tokens]).all()
    assert (inner.sketch_variance > 0).all()
    assert results["settings"]["probe_every"] == 2
    assert main(flags(model, cola, tmp_path / "without", **SKETCH)) == 0
    assert same_weights(probed, tmp_path / "without")
    assert not (tmp_path / "without" / "variance.csv").exists()


@pytest.mark.thorough
def test_a_resumed_run_has_the_whole_table(probed, model, cola, tmp_path, monkeypatch):
    bomb = type("Bomb", (SignalTimer,), {"step": 3, "evaluation": None, "signum": signal.SIGTERM})
    argv = flags(model, cola, tmp_path / "run", probe_every=2, **SKETCH)
    with monkeypatch.context() as patch:
        patch.setattr(training, "StepTimer", bomb)
        assert main(argv) == 128 + signal.SIGTERM
    assert not (tmp_path / "run" / "variance.csv").exists()
    assert main([*argv, "--resume_from_checkpoint", "last"]) == 0
    pd.testing.assert_frame_equal(table_of(tmp_path / "run"), table_of(probed), check_exact=True)


def test_the_exact_baseline_says_what_the_sketch_of_the_other_flags_would_add(model, cola, tmp_path):
    options = {"kind": "exact", "ratio": 0.3, "target_modules": ["intermediate.dense"], "probe_every": 5}
    assert main(flags(model, cola, tmp_path, num_train_epochs=1, **options)) == 0
    found = table_of(tmp_path)
    config = RMMConfig(ratio=0.3, min_rows=4)
    assert set(found.module) == {f"roberta.encoder.layer.{layer}.intermediate.dense" for layer in range(2)}
    assert set(found.kind) == {config.kind}
    assert (found.rows == [config.spec(tokens, 32, 4).rows for tokens in found.tokens]).all()
    assert (found.noise > 0).all()
    assert results_of(tmp_path)["sketch"] == "exact"


@pytest.mark.thorough
def test_comparisons_hand_the_flag_on(model, cola, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "run_process", main)  # in this process: what a run does is not the question
    options = {"compare": ["exact", "rows:0.5"], "max_steps": 2, "probe_every": 2}
    assert main(flags(model, cola, tmp_path, **options)) == 0
    assert set(table_of(tmp_path / "exact" / "seed-42").kind) == {"countsketch"}
    assert set(table_of(tmp_path / "rows-0.5" / "seed-42").kind) == {"rows"}


@pytest.mark.thorough
def test_overwriting_removes_an_earlier_table(model, cola, tmp_path):
    options = {"max_steps": 1, **SKETCH}
    assert main(flags(model, cola, tmp_path, probe_every=1, **options)) == 0
    assert main(flags(model, cola, tmp_path, overwrite_output_dir=True, **options)) == 0
    assert not (tmp_path / "variance.csv").exists()


def test_a_run_that_is_too_short_has_a_header_only(model, cola, tmp_path):
    assert main(flags(model, cola, tmp_path, probe_every=100, max_steps=2, **SKETCH)) == 0
    assert (tmp_path / "variance.csv").read_text() == ",".join(COLUMNS) + "\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probe_every": 0}, "probe_every must be at least 1, got 0"),
        ({"probe_every": 5, "kind": "exact", "target_modules": ["qerry"]}, "target_modules must match a linear layer"),
    ],
)
def test_what_cannot_be_probed_is_refused_before_anything_is_written(model, cola, tmp_path, capsys, options, message):
    assert message in fails(capsys, flags(model, cola, tmp_path / "run", **options))
    assert not (tmp_path / "run").exists()
