"""RMMCallback: the Trainer logs the noise, resumes with it, and trains as without it."""

import logging
import math

import pytest
import torch
from helpers import tiny_model
from trainer_helpers import Sentences, make_trainer, probed, weights

from rmm_linear import RMMConfig, convert, sketch_tensors
from rmm_linear.integrations.transformers import ProbeCallback, RMMCallback, SketchStateCallback
from rmm_linear.memory import peak, track_saved

LAYER = "roberta.encoder.layer.1.intermediate.dense"


def hooks(model):
    return [(name, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    trainer, callback, recorder = probed(tmp_path_factory.mktemp("run"), save_strategy="steps", save_steps=3)
    before = hooks(trainer.model)
    trainer.train()
    return trainer, callback, recorder, before


def test_rows_are_those_of_every_nth_step(run):
    _, callback, _, _ = run
    rows = callback.results.rows
    assert [row.step for row in rows if row.module == LAYER] == [2, 4, 6]
    assert len(rows) == 3 * 14
    assert {(row.rows, row.tokens, row.bits) for row in rows if row.module == LAYER} == {(20, 80, 32)}


@pytest.mark.parametrize("place", ["reporters", "log_history"])
def test_the_trainers_logs_hold_the_values(run, place):
    trainer, callback, recorder, _ = run
    logs = recorder.logs if place == "reporters" else trainer.state.log_history
    entries = [entry for entry in logs if "rmm/noise" in entry]
    assert [entry["step"] for entry in entries] == [2, 4, 6]
    for entry in entries:
        rows = [row for row in callback.results.rows if row.step == entry["step"]]
        for row in rows:
            assert math.isnan(row.noise) or entry[f"rmm/noise/{row.module}"] == row.noise
            assert entry[f"rmm/alpha/{row.module}"] == row.alpha
        assert len(rows) == 14
        layers = [row for row in rows if row.samples == "sequences"]  # all but the head, with one row per sequence
        noises = sorted(row.noise for row in layers)
        assert len(noises) == 12
        assert noises[5] <= entry["rmm/noise"] <= noises[6]
        alphas = sorted(row.alpha for row in layers)
        assert entry["rmm/alpha"] == pytest.approx((alphas[5] + alphas[6]) / 2)


def test_the_trainers_own_logs_are_all_there(run):
    """Logging takes back the flag that the Trainer's entry of the same step waits for."""
    _, _, recorder, _ = run
    assert [entry["step"] for entry in recorder.logs if "loss" in entry] == [1, 2, 3, 4, 5, 6]


def test_memory_is_that_of_an_ordinary_step(tmp_path):
    """Of the step before the probe's: bytes do not depend on the values, so another pass over its batch shows them."""
    trainer, _, recorder = probed(tmp_path, every=6, max_steps=6)  # modules have learned which rows have a gradient
    batches = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: batches.append({k: v.clone() for k, v in kwargs.items()}), with_kwargs=True
    )
    trainer.train()
    (entry,) = [entry for entry in recorder.logs if "rmm/noise" in entry]
    batch = batches[4]
    trainer.model.zero_grad()
    with track_saved(trainer.model) as kept, peak("cpu") as highest:
        trainer.model.train()(**batch).loss.backward()
    assert entry["rmm/kept_bytes"] == kept.total > 0
    assert entry["rmm/peak_bytes"] == pytest.approx(highest.bytes, rel=0.05)


@pytest.mark.parametrize(
    ("every", "config"), [pytest.param(1, None, marks=pytest.mark.thorough), (2, RMMConfig(memory=0.3, min_rows=1))]
)
def test_weights_are_the_same_to_the_bit(tmp_path, every, config):
    plain, _, _ = make_trainer(tmp_path / "plain", config=config)
    plain.train()
    watched, callback, recorder = probed(tmp_path / "watched", every=every, config=config)
    watched.train()
    assert len(callback.results.rows) == 14 * (6 // every)
    measured = ["rmm/kept_bytes" in entry for entry in recorder.logs if "rmm/noise" in entry]
    assert measured == [True] + [False] * (6 // every - 1)
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(watched), strict=True))


def test_the_whole_gradient_is_logged_and_resumed(tmp_path):
    """With whatever the Trainer does with accumulation and autocast, and the weights stay the same to the bit."""
    options = {"bf16": True, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 3}
    found = []
    for whole_every in (None, 2):
        folder = tmp_path / str(whole_every)
        trainer, callback, recorder = probed(folder, every=1, whole_every=whole_every, **options)
        trainer.train()
        found.append((weights(trainer), recorder, callback))
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    _, recorder, callback = found[1]
    assert list(callback.results.whole) == [2, 4, 6]
    logs = [entry for entry in recorder.logs if "rmm/noise_whole/all" in entry]
    assert [entry["step"] for entry in logs] == [2, 4, 6]
    for entry in logs:
        noise = callback.results.whole[entry["step"]]
        assert entry["rmm/noise_whole/all"] == entry["rmm/noise_whole/linear"] == noise.whole() > 0
        for block, ratio in noise.by_depth().items():
            assert entry[f"rmm/noise_whole/all/{block}"] == ratio
    assert len({recorder.logs[0]["rmm/kept_bytes"] for _, recorder, _ in found}) == 1
    resumed, callback, _ = probed(tmp_path / "2", every=1, whole_every=2, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "2" / "checkpoint-3"))
    assert callback.results.whole == found[1][2].results.whole


def test_nothing_stays_after_training(run):
    trainer, _, _, before = run
    assert hooks(trainer.model) == before
    assert "training_step" not in vars(trainer)


@pytest.mark.parametrize("middle", [pytest.param(3, marks=pytest.mark.thorough), 5])
def test_a_resumed_run_has_the_same_rows_and_weights(run, tmp_path, middle, capsys):
    """Step 2 comes from the checkpoint; steps 4 and 6 are looked at in their turn."""
    whole, callback, _, _ = run
    first, _, _ = probed(tmp_path, save_strategy="steps", save_steps=middle)
    first.train()
    second, resumed, recorder = probed(tmp_path, save_strategy="steps", save_steps=middle)
    capsys.readouterr()
    second.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{middle}"))
    looks = [entry for entry in recorder.logs if "rmm/noise" in entry]
    assert [entry["step"] for entry in looks] == [s for s in (4, 6) if s > middle]
    assert "rmm/kept_bytes" in looks[0]  # though the step before was made by the other run
    assert "rmm/peak_bytes" in looks[0]
    assert repr(resumed.results.rows) == repr(callback.results.rows)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(second), strict=True))
    assert "rmm_linear: converted=14" in capsys.readouterr().out


@pytest.mark.parametrize("reentrant", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_gradient_checkpointing(tmp_path, reentrant):
    found = []
    for checkpointed in (False, True):
        options = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}} if checkpointed else {}
        trainer, callback, _ = probed(
            tmp_path / str(checkpointed), every=1, max_steps=1, gradient_checkpointing=checkpointed, **options
        )
        trainer.train()
        found.append(callback.results.rows)
    assert len(found[0]) == len(found[1]) == 14
    for one, other in zip(*found, strict=True):
        assert (one.module, one.noise) == (other.module, pytest.approx(other.noise, rel=1e-3, nan_ok=True))


def test_the_report_is_printed_when_training_begins(tmp_path, capsys):
    trainer, callback, _ = probed(tmp_path, max_steps=1)
    assert "rmm_linear: converted" not in capsys.readouterr().out
    before = callback.report.modules()  # the first step then adds what it measures
    trainer.train()
    out = capsys.readouterr().out
    assert out.count("rmm_linear: converted=14") == 1
    assert before in out
    silent, _, _ = probed(tmp_path, config=None, max_steps=1)
    silent.train()
    assert "rmm_linear" not in capsys.readouterr().out


def test_the_warning_comes_once_and_not_again_after_resuming(tmp_path, caplog):
    def run(limit, resume=None):
        caplog.clear()
        trainer, callback, _ = probed(tmp_path, limit=limit, save_strategy="steps", save_steps=2, max_steps=4)
        trainer.train(resume_from_checkpoint=resume)
        found = [r.getMessage() for r in caplog.records if r.name == "rmm_linear.integrations.transformers"]
        return callback, found

    with caplog.at_level(logging.WARNING):
        callback, quiet = run(1e9)
        assert quiet == []
        medians = [callback.results.medians(step)["noise"] for step in (2, 4)]
        assert min(medians) > 1e-6
        _, found = run(1e-6)
        assert len(found) == 1
        assert found[0].startswith(f"Step 2: the variance ratio, sketch to minibatch, is {medians[0]:.3g} (median")
        assert "more than the limit of 1e-06" in found[0]
        assert run(1e-6, str(tmp_path / "checkpoint-2"))[1] == []


def test_a_run_that_failed_can_begin_again(tmp_path):
    trainer, callback, _ = probed(tmp_path, max_steps=2)
    before = hooks(trainer.model)

    def fail(*_):
        raise KeyboardInterrupt

    handle = trainer.model.roberta.encoder.layer[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    handle.remove()
    assert "training_step" not in vars(trainer)
    trainer.train()
    assert hooks(trainer.model) == before
    assert [row.step for row in callback.results.rows] == [2] * 14


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be at least 1, got 0"),
        ({"whole_every": 0}, ValueError, "whole_every must be at least 1, got 0"),
        ({"limit": "high"}, TypeError, "limit must be a positive number, got 'high'"),
        ({"limit": 0}, ValueError, "limit must be positive, got 0"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, options, error, message):
    trainer, _, _ = make_trainer(tmp_path)
    with pytest.raises(error, match=message):
        RMMCallback(trainer, **options)


def test_something_else_than_a_trainer_is_refused():
    with pytest.raises(TypeError, match=r"must be a transformers Trainer or None, got Linear\. Leave it out"):
        RMMCallback(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"convert must be an RMMConfig or None, got 0\.1"):
        RMMCallback(convert=0.1)
    with pytest.raises(ValueError, match=r"got both\. Give one of them"):
        RMMCallback(report=convert(tiny_model("roberta")), convert=RMMConfig())


def test_the_plain_callback_needs_no_trainer_and_logs_nothing(tmp_path):
    trainer, _, recorder = make_trainer(tmp_path, max_steps=2)
    callback = ProbeCallback(every=2, modules=["intermediate.dense"])
    trainer.add_callback(callback)
    trainer.train()
    assert [row.module for row in callback.results.rows] == [
        f"roberta.encoder.layer.{i}.intermediate.dense" for i in range(2)
    ]
    assert not any("rmm/noise" in entry for entry in recorder.logs)


# The state of norm estimators


class Numbered(Sentences):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "sample_index": index}


@pytest.mark.parametrize("where", ["own folder", "moved"])
def test_a_resumed_run_goes_on_with_what_its_estimators_have_learned(tmp_path, where):
    def trainer(folder, callback):
        config = RMMConfig(kind="wta", ratio=0.25, min_rows=1, norm_estimator="sample_cache")
        made, _, _ = make_trainer(folder, config=config, max_steps=9, save_strategy="steps", save_steps=7)
        made.args.remove_unused_columns = False
        made.train_dataset = Numbered()
        made.add_callback(callback)
        return made

    whole = trainer(tmp_path / "whole", SketchStateCallback())
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-7"
    resume = None
    if where == "moved":
        resume = checkpoint = checkpoint.rename(tmp_path / "kept")
    resumed = trainer(tmp_path / "whole", SketchStateCallback(resume))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))
    assert sketch_tensors(resumed.model).keys() == sketch_tensors(whole.model).keys() != set()


def test_a_checkpoint_without_the_state_is_warned_of(tmp_path, caplog):
    first, _, _ = make_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    first.train()
    again, callback, _ = probed(tmp_path, max_steps=3)
    with caplog.at_level(logging.WARNING):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "There is no sketch_state.json" in caplog.text
    assert callback.results is not None
