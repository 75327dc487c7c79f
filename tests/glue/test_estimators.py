"""Norm estimators in the GLUE script: their flags, the examples' numbers, and runs that are resumed to the bit."""

import signal

import pytest
from glue_helpers import SignalTimer, flags, results_of, same_weights, write_cola

from glue_finetune import training
from glue_finetune.__main__ import main

STEPS = 3  # per epoch: 24 rows in batches of 8
WTA = {"kind": "wta", "ratio": 0.3, "uniform_mix": 0.2}


@pytest.fixture(scope="module")
def cola(tmp_path_factory):
    return write_cola(tmp_path_factory.mktemp("cola"), train=8 * STEPS)


# Interrupts the run in the middle of the second epoch.
_Stop = type("_Stop", (SignalTimer,), {"step": STEPS + 2, "evaluation": None, "signum": signal.SIGINT})


@pytest.mark.parametrize("estimator", ["position_token", "sample_cache"])
@pytest.mark.thorough
def test_a_resumed_run_ends_with_the_same_weights(model, cola, tmp_path, monkeypatch, estimator):
    options = {**WTA, "norm_estimator": estimator}
    assert main(flags(model, cola, tmp_path / "whole", **options)) == 0
    argv = flags(model, cola, tmp_path / "run", **options)
    with monkeypatch.context() as patch:
        patch.setattr(training, "StepTimer", _Stop)
        assert main(argv) == 130
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    assert len(list(checkpoint.glob("sketch_state.json.*.safetensors"))) == 1
    assert main([*argv, "--resume_from_checkpoint", "last"]) == 0
    assert same_weights(tmp_path / "run", tmp_path / "whole")
    whole, resumed = results_of(tmp_path / "whole"), results_of(tmp_path / "run")
    assert whole["sketch"]["norm_estimator"] == estimator
    assert whole["sketch"]["uniform_mix"] == 0.2
    assert whole["norm_estimator_bytes"] == resumed["norm_estimator_bytes"] > 0


def test_a_cache_remembers_every_training_row_and_no_other(model, cola, tmp_path):
    """Its bytes are those of 24 sequences for each layer that sees tokens; 24 rows of evaluation add nothing."""
    options = {**WTA, "norm_estimator": "sequence_cache", "num_train_epochs": 1}
    assert main(flags(model, cola, tmp_path / "run", **options)) == 0
    layers = 2 * 6  # and not the head's two, which see one row per sequence and know no sequences
    results = results_of(tmp_path / "run")
    assert results["norm_estimator_bytes"] == layers * (24 * 2 + 8)
    assert len(results["converted"]) == layers + 2
