"""Training runs end to end: what they record, how they stop, and that a resumed run ends with the very same weights."""

import json
import os
import signal
import sys
import threading
import time

import pytest
import torch
from glue_helpers import SignalTimer, flags, results_of, same_weights, write_pairs

from glue_finetune import trainer, training
from glue_finetune.__main__ import main
from glue_finetune.trainer import GlueTrainer, InterruptCallback
from rmm_linear import RMMConfig, RMMLinear
from rmm_linear.memory import track_saved

STEPS = 6  # per epoch: 48 rows in batches of 8
EPOCHS = 3
SKETCH = {"operations": ["linear"], "kind": "gaussian", "ratio": 0.2, "num_train_epochs": EPOCHS, "seed": 7}


@pytest.fixture(scope="module")
def uninterrupted(model, cola, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "run"
    assert main(flags(model, cola, output, **SKETCH)) == 0
    return output


def test_results_record_the_run(uninterrupted):
    results = results_of(uninterrupted)
    assert [entry["epoch"] for entry in results["epochs"]] == [1.0, 2.0, 3.0]
    assert [entry["step"] for entry in results["epochs"]] == [STEPS, 2 * STEPS, 3 * STEPS]
    scores = [entry["matthews_correlation"] for entry in results["epochs"]]
    assert all(-1 <= score <= 1 for score in scores)
    assert all(entry["train_loss"] > 0 and entry["loss"] > 0 for entry in results["epochs"])
    best = max(range(EPOCHS), key=scores.__getitem__)
    assert results["score"] == {
        "metric": "matthews_correlation",
        "best": scores[best],
        "best_epoch": best + 1.0,
        "last": scores[-1],
        "last_epoch": 3.0,
    }
    stated = RMMConfig(operations="linear", kind="gaussian", ratio=0.2, min_rows=4)
    assert RMMConfig.from_dict(results["sketch"]) == stated
    assert len(results["converted"]) == 2 * 6 + 2
    assert (results["seed"], results["settings"]["learning_rate"], results["steps"]) == (7, 1e-3, EPOCHS * STEPS)
    assert results["settings"]["adam_beta2"] == 0.98
    assert results["memory"]["at_step"] == 10
    assert results["seconds_per_step"]["steps"] == EPOCHS * STEPS - 1
    assert 0 < results["seconds_per_step"]["median"] < results["seconds_of_training"]
    assert results["memory"]["peak_bytes"] > results["memory"]["bytes_kept_for_backward"] > 0
    assert results["versions"]["torch"] == torch.__version__
    assert results["resumed"] is False


def test_the_trained_model_can_be_used(uninterrupted):
    from transformers import pipeline

    classify = pipeline("text-classification", model=str(uninterrupted), device=-1)
    (answer,) = classify("The dogs bark .")
    assert answer["label"] in ("0", "1")


@pytest.mark.parametrize("kind", ["exact", "gaussian"])
def test_bytes_saved_are_those_of_one_step(model, cola, tmp_path, monkeypatch, kind):
    seen = []

    class Recorder(GlueTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            if model.training:
                seen[:] = [model, {name: tensor.clone() for name, tensor in inputs.items()}]
            return super().compute_loss(model, inputs, **kwargs)

    monkeypatch.setattr(training, "GlueTrainer", Recorder)
    assert main(flags(model, cola, tmp_path / "run", kind=kind, ratio=0.2, max_steps=2)) == 0
    network, batch = seen
    with track_saved(network.train()) as saved:
        loss = network(**batch).loss
    assert loss.requires_grad
    memory = results_of(tmp_path / "run")["memory"]
    assert memory["bytes_kept_for_backward"] == saved.total > 0
    assert memory["batch_shape"] == list(batch["input_ids"].shape)
    assert memory["at_step"] == 2  # the last, as the run has fewer than ten
    assert any(isinstance(module, RMMLinear) for module in network.modules()) == (kind != "exact")


def test_a_sketch_keeps_less_and_another_seed_gives_other_weights(model, cola, tmp_path, uninterrupted):
    assert main(flags(model, cola, tmp_path / "exact", **{**SKETCH, "kind": "exact"})) == 0
    assert main(flags(model, cola, tmp_path / "seed", **{**SKETCH, "seed": 8})) == 0
    exact, sketched = results_of(tmp_path / "exact"), results_of(uninterrupted)
    assert exact["sketch"] == "exact"
    assert exact["converted"] == []
    assert exact["memory"]["batch_shape"] == sketched["memory"]["batch_shape"]
    assert sketched["memory"]["bytes_kept_for_backward"] < 0.9 * exact["memory"]["bytes_kept_for_backward"]
    assert exact["memory"]["bytes_kept_by_layers"] < exact["memory"]["bytes_kept_for_backward"]
    kept_by_others = [
        run["memory"]["bytes_kept_for_backward"] - run["memory"]["bytes_kept_by_layers"] for run in (exact, sketched)
    ]
    assert kept_by_others[0] == kept_by_others[1]
    assert not same_weights(tmp_path / "exact", uninterrupted)
    assert not same_weights(tmp_path / "seed", uninterrupted)


def test_mnli_evaluates_matched_and_mismatched(model, tmp_path):
    labels, stems = ["neutral", "entailment", "contradiction"], ("train", "dev_matched", "dev_mismatched")
    data = write_pairs(tmp_path, "MNLI", labels, stems)
    assert main(flags(model, data, tmp_path / "run", task="mnli", num_train_epochs=1)) == 0
    results = results_of(tmp_path / "run")
    (epoch,) = results["epochs"]
    assert {"matched_accuracy", "mismatched_accuracy", "matched_loss", "mismatched_loss"} < epoch.keys()
    assert results["score"]["metric"] == "matched_accuracy"
    assert results["score"]["best"] == epoch["matched_accuracy"]


def test_stsb_is_a_regression(model, tmp_path):
    data = write_pairs(tmp_path, "STS-B", ["5.000", "0.200", "2.6"], ("train", "dev"))
    assert main(flags(model, data, tmp_path / "run", task="stsb", num_train_epochs=1)) == 0
    (epoch,) = results_of(tmp_path / "run")["epochs"]
    assert -1 <= epoch["pearson"] <= 1
    assert -1 <= epoch["spearmanr"] <= 1
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["problem_type"] == "regression"


@pytest.mark.parametrize(
    ("step", "evaluation", "signum", "save_strategy"),
    [
        (1, None, signal.SIGINT, "epoch"),
        pytest.param(STEPS, None, signal.SIGTERM, "no", marks=pytest.mark.thorough),
        (STEPS + 2, None, signal.SIGTERM, "epoch"),
        pytest.param(2 * STEPS - 1, None, signal.SIGINT, "no", marks=pytest.mark.thorough),
        (-1, STEPS, signal.SIGINT, "no"),
    ],
    ids=["first step", "last step of an epoch", "within an epoch", "before the last step", "evaluation"],
)
def test_a_signal_saves_and_the_resumed_run_ends_with_the_same_weights(
    model, cola, tmp_path, uninterrupted, monkeypatch, step, evaluation, signum, save_strategy
):
    bomb = type("Bomb", (SignalTimer,), {"step": step, "evaluation": evaluation, "signum": signum})
    argv = flags(model, cola, tmp_path / "run", save_strategy=save_strategy, **SKETCH)
    with monkeypatch.context() as patch:
        patch.setattr(training, "StepTimer", bomb)
        assert main(argv) == 128 + signum
    assert not (tmp_path / "run" / "results.json").exists()
    saved = [path.name for path in (tmp_path / "run").glob("checkpoint-*")]
    assert saved == [f"checkpoint-{evaluation or step}"]
    assert signal.getsignal(signum) is (signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)

    assert main([*argv, "--resume_from_checkpoint", "last", "--save_strategy", "epoch"]) == 0
    assert same_weights(tmp_path / "run", uninterrupted)
    resumed, whole = results_of(tmp_path / "run"), results_of(uninterrupted)
    assert resumed["resumed"] is True
    metrics = ("epoch", "step", "loss", "matthews_correlation")
    assert [[e[name] for name in metrics] for e in resumed["epochs"]] == [
        [e[name] for name in metrics] for e in whole["epochs"]
    ]
    assert resumed["memory"]["bytes_kept_for_backward"] == whole["memory"]["bytes_kept_for_backward"]


def test_what_the_sketches_have_learned_is_resumed_too(model, cola, tmp_path, monkeypatch):
    options = {"kind": "wta", "memory": 0.5, "norm_estimator": "position", "num_train_epochs": 2}
    assert main(flags(model, cola, tmp_path / "whole", **options)) == 0
    for step in (8,):
        argv = flags(model, cola, tmp_path / f"run-{step}", **options)
        bomb = type("Bomb", (SignalTimer,), {"step": step, "evaluation": None, "signum": signal.SIGINT})
        with monkeypatch.context() as patch:
            patch.setattr(training, "StepTimer", bomb)
            assert main(argv) == 130
        assert main([*argv, "--resume_from_checkpoint", "last"]) == 0
        assert same_weights(tmp_path / f"run-{step}", tmp_path / "whole")
    assert results_of(tmp_path / "whole")["norm_estimator_bytes"] > 0


def test_a_signal_in_the_last_step_still_writes_the_results(model, cola, tmp_path, uninterrupted, monkeypatch):
    last = {"step": EPOCHS * STEPS, "evaluation": None, "signum": signal.SIGTERM}
    monkeypatch.setattr(training, "StepTimer", type("Bomb", (SignalTimer,), last))
    assert main(flags(model, cola, tmp_path / "run", **SKETCH)) == 143
    assert results_of(tmp_path / "run")["score"] == results_of(uninterrupted)["score"]
    assert same_weights(tmp_path / "run", uninterrupted)


def test_a_signal_before_training_leaves_nothing_behind(model, cola, tmp_path, monkeypatch, capsys):
    load = training.load_model

    def slow(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return load(*args)

    monkeypatch.setattr(training, "load_model", slow)
    assert main(flags(model, cola, tmp_path / "run")) == 143
    assert "there is nothing to save" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_second_signal_ends_the_process_at_once(monkeypatch):
    exits = []
    monkeypatch.setattr(trainer.os, "_exit", exits.append)
    with InterruptCallback().installed() as callback:
        callback.on_train_begin()
        signal.raise_signal(signal.SIGINT)
        assert (callback.signum, exits) == (signal.SIGINT, [])
        signal.raise_signal(signal.SIGTERM)
        assert exits == [143]


def test_training_outside_the_main_thread_leaves_signals_alone(model, cola, tmp_path):
    status = []
    argv = flags(model, cola, tmp_path / "run", max_steps=1)
    thread = threading.Thread(target=lambda: status.append(main(argv)))
    thread.start()
    thread.join()
    assert status == [0]


def test_another_process_stops_on_a_signal_and_its_run_resumes(model, cola, tmp_path, uninterrupted):
    argv, said = flags(model, cola, tmp_path / "run", **SKETCH), tmp_path / "said"
    said.touch()
    child = os.fork()
    if child == 0:
        status = 70
        try:
            sys.stdout = sys.stderr = file = said.open("w", buffering=1)
            os.dup2(file.fileno(), 2)
            status = main(argv)
        finally:
            os._exit(status)
    end = time.monotonic() + 100
    while "epoch 1.00" not in said.read_text() and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(child, signal.SIGINT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    assert "SIGINT: finishing the step, then saving a checkpoint" in said.read_text()
    assert not (tmp_path / "run" / "results.json").exists()
    assert main([*argv, "--resume_from_checkpoint", "True"]) == 0
    assert same_weights(tmp_path / "run", uninterrupted)
