"""RMMCallback(fit=...) plans the Trainer's model in its first step, and again before larger batches."""

import pytest
import torch
from fit_helpers import RECOMPUTED, cut, elements, entries, fitting
from torch._subclasses.fake_tensor import FakeTensor
from trainer_helpers import make_trainer, weights

import rmm_linear
from rmm_linear import RMMConfig
from rmm_linear.context.checkpointing import is_checkpointed
from rmm_linear.integrations.fit_training import FitCallback
from rmm_linear.integrations.transformers import RMMCallback


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.one_of(2)
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "bf16": True}], ids=["fp32", "bf16"])
def test_a_run_whose_plan_keeps_everything_is_the_run_without_it(tmp_path, options):
    """Bit for bit, with dropout and shuffled data: nothing is drawn from the run's data and random numbers."""
    plain, _, _ = make_trainer(tmp_path / "plain", config=None, max_steps=3, **options)
    plain.train()
    trainer, callback, _ = fitting(tmp_path / "fit", {"memory": "1GB"}, max_steps=3, **options)
    trainer.train()
    assert callback.fit_report.is_exact
    assert same(weights(plain), weights(trainer))
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (plain, trainer)]
    assert losses[0] == losses[1] != []
    assert "training_step" not in vars(trainer)


def test_recomputed_blocks_train_as_exact_ones(tmp_path, capsys):
    """Recomputation draws the same dropout; evaluations in between and accumulated gradients change nothing."""
    options = {"max_steps": 2, "gradient_accumulation_steps": 2}

    def evaluated(one):
        one.eval_dataset, one.args.eval_strategy, one.args.eval_steps = one.train_dataset, "steps", 1

    plain, _, _ = make_trainer(tmp_path / "plain", config=None, **options)
    evaluated(plain)
    plain.train()
    trainer, callback, recorder = fitting(tmp_path / "fit", RECOMPUTED, **options)
    evaluated(trainer)
    capsys.readouterr()
    trainer.train()
    printed = capsys.readouterr().out
    assert str(callback.fit_report) in printed
    assert "buckets" not in printed
    assert trainer.model.rmm_plan is callback.fit_report.plan
    choices = {block.choice for block in callback.fit_report.plan.blocks}
    assert {"keep"} < choices <= {"keep", "recompute", "selective", "nested"}
    static, alone = callback.fit_report.static, fitting(tmp_path, RECOMPUTED, max_steps=1)
    assert static.optimizer > static.gradients
    alone[0].train()
    extra = callback.fit_report.exact_peak - alone[1].fit_report.exact_peak  # gradients that accumulate count
    assert 0 < extra <= static.gradients
    assert same(weights(plain), weights(trainer))
    assert sum("eval_loss" in entry for entry in trainer.state.log_history) == 2
    assert len(entries(trainer)) == 1
    assert not any(name.startswith("rmm/") for entry in recorder.logs for name in entry)  # there is no noise


def test_converted_blocks_are_planned_by_noise_and_their_noise_is_logged(tmp_path):
    settings = {"memory": 0.95, "allow": ["keep", "sketch"], "max_noise": 100}  # so that linear layers are compressed
    trainer, callback, recorder = fitting(tmp_path, settings, every=2, max_steps=2)
    trainer.train()
    report = callback.fit_report
    assert report.plan.config is not None
    assert report.noise is not None
    assert not any("The variance ratio is not measured" in note for note in report.notes)
    assert any("rmm/noise" in entry for entry in recorder.logs)


def test_a_loss_that_is_not_the_models_own_is_a_function_as_example(tmp_path):
    """Then noise and memory are those of the Trainer's loss. Here the least memory is the budget."""
    settings = {"memory": "least", "allow": ["keep", "pack", "recompute"]}
    trainer, callback, _ = fitting(tmp_path, settings, max_steps=1, label_smoothing_factor=0.1)
    trainer.train()
    report = callback.fit_report
    assert not any("The variance ratio is not measured" in note for note in report.notes)
    assert report.noise
    assert report.memory is None
    assert report.peak < report.exact_peak


def test_larger_batches_are_planned_anew_once_and_gradients_survive(tmp_path, caplog):
    """The sizes of the batches decide, in the middle of an accumulated step too."""
    sizes = [8, 20, 12, 20]
    options = {"max_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    trained = []
    for fit in (None, RECOMPUTED):
        if fit is None:
            trainer, _, _ = make_trainer(tmp_path, config=None, **options)
        else:
            trainer, callback, _ = fitting(tmp_path, fit, **options)
        cut(trainer, sizes)
        trainer.train()
        trained.append(weights(trainer))
    assert same(*trained)
    assert elements(trainer) == [32, 80]
    (said,) = [message for message in caplog.messages if "planned again" in message]
    assert said.startswith("A batch of 80 elements came after a plan for 32: planned again. rmm_linear fit: ")
    assert trainer.model.rmm_plan is callback.fit_report.plan


@pytest.mark.thorough
def test_the_plan_stays_where_nothing_fits_a_larger_batch(tmp_path, caplog):
    trainer, callback, _ = fitting(tmp_path, {"memory": 1.0, "allow": ["keep"]}, max_steps=3)
    cut(trainer, [4, 20, 20])
    callback._fitting.settings["memory"] = budget = 200_000  # for four tokens, not for twenty
    trainer.train()
    assert callback.fit_report.memory == budget
    assert trainer.model.rmm_plan is callback.fit_report.plan
    assert trainer.model.rmm_plan.is_applied
    assert [message for message in caplog.messages if "so the plan stays: memory=200000 cannot be met" in message]
    assert elements(trainer) == [16]


def test_what_cannot_be_met_ends_the_training_before_its_first_step(tmp_path):
    trainer, _, _ = fitting(tmp_path, 1000, max_steps=1)
    before = weights(trainer)
    with pytest.raises(ValueError, match="memory=1000 cannot be met"):
        trainer.train()
    assert same(before, weights(trainer))
    assert "rmm_plan" not in vars(trainer.model)
    assert "training_step" not in vars(trainer)


@pytest.mark.thorough
def test_a_second_training_keeps_the_plan(tmp_path, capsys):
    trainer, callback, _ = fitting(tmp_path, RECOMPUTED, max_steps=1)
    trainer.train()
    report = callback.fit_report
    trainer.train()
    assert callback.fit_report is report
    assert capsys.readouterr().out.count("rmm_linear fit:") == 1


def test_checkpointing_is_off_as_long_as_the_plan_is_applied(tmp_path):
    """Whatever the Trainer turns on, whether a training ends or raises; "keep" leaves it on."""
    for setting, is_off in ({"checkpointing": "keep"}, False), ({}, True):
        trainer, _, _ = fitting(tmp_path, {"memory": 1.0, **setting}, max_steps=1, gradient_checkpointing=True)
        trainer.train()
        assert is_checkpointed(trainer.model) is not is_off
    step, trainer.training_step = trainer.training_step, lambda *given: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not is_checkpointed(trainer.model)
    trainer.training_step = step
    trainer.train()
    assert not is_checkpointed(trainer.model)
    rmm_linear.revert(trainer.model)
    assert is_checkpointed(trainer.model)


def test_an_error_that_is_not_of_a_budget_is_not_taken_for_one(tmp_path):
    trainer, _, _ = fitting(tmp_path, 1.0, max_steps=1)
    loss = trainer.compute_loss

    def guarded(*args, **kwargs):
        value = 2 * loss(*args, **kwargs)
        if isinstance(value, FakeTensor):
            raise ValueError("a guard")
        return value

    trainer.compute_loss = guarded
    with pytest.raises(ValueError, match=r"^The model cannot be planned: a guard"):
        trainer.train()


def test_a_plan_of_the_user_stays(tmp_path, caplog):
    trainer, callback, _ = fitting(tmp_path, RECOMPUTED, max_steps=1)
    batch = next(iter(trainer.get_train_dataloader()))
    plan = rmm_linear.fit(trainer.model, dict(batch), 1.0).plan
    trainer.train()
    assert trainer.model.rmm_plan is plan
    assert callback.fit_report is None
    assert any("has a plan already" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"fit": True}, TypeError, 'fit must be a budget such as "8GB"'),
        ({"fit": {"max_nose": 1}}, ValueError, "Did you mean 'max_noise'"),
        ({"fit": {"max_noise": 1}}, ValueError, 'must have "memory" or "time"'),
        ({"fit": {"memory": "1GB", "length": 0}}, ValueError, "length must be at least 1"),
        ({"fit": 1.5}, ValueError, r"memory as a share must be in \(0, 1\]"),
        ({"fit": "1GB", "convert": RMMConfig()}, ValueError, "got convert too"),
    ],
)
def test_bad_settings_are_refused_at_once(options, error, text):
    with pytest.raises(error, match=text):
        RMMCallback(**options)


def test_what_does_not_go_with_a_fit_is_refused(tmp_path):
    trainer, report, _ = make_trainer(tmp_path, max_steps=1)
    trainer.add_callback(RMMCallback(trainer, fit="1GB"))
    with pytest.raises(ValueError, match=r"Call rmm_linear\.revert\(model\) first"):
        trainer.train()
    with pytest.raises(ValueError, match="got report too"):
        RMMCallback(report=report, fit="1GB")
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="got a Trainer with the first version of FSDP"):
        FitCallback("1GB").begin(trainer, trainer.model)


def planned_ahead(folder, length, lengths, **options):
    fit = {**RECOMPUTED, "length": length}
    trainer, callback, _ = fitting(folder, fit, max_steps=len(lengths), **options)
    cut(trainer, lengths)
    trainer.train()
    return trainer, callback


@pytest.mark.thorough
def test_with_a_length_the_longest_batch_is_planned_for_once(tmp_path, caplog):
    """The plan is that of a first batch with that length; shorter and equal ones change nothing."""
    trainer, _ = planned_ahead(tmp_path / "ahead", 20, [8, 12, 20])
    assert elements(trainer) == [80]
    other, _, _ = fitting(tmp_path / "long", RECOMPUTED, max_steps=1)
    cut(other, [20])
    other.train()
    # Of the same batch; which words are cheapest is a matter of times.
    assert entries(trainer)[0]["exact_peak_bytes"] == entries(other)[0]["exact_peak_bytes"]
    assert entries(trainer)[0]["settings"]["length"] == 20
    assert not [message for message in caplog.messages if "planned" in message]


@pytest.mark.thorough
def test_batches_beyond_the_length_are_said_and_planned_for(tmp_path, caplog):
    trainer, _ = planned_ahead(tmp_path, 8, [12, 20])
    assert elements(trainer) == [48, 80]
    said = [message for message in caplog.messages if "planned" in message]
    assert said[0] == "The first batch has sequences of 12 tokens, more than length=8: they are planned for."
    assert said[1].startswith("A batch of 80 elements came after a plan for 48: planned again. ")


def test_a_length_beyond_the_positions_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"length must be at most \d+, the positions of the model, got 9999"):
        planned_ahead(tmp_path, 9999, [8])


@pytest.mark.thorough
def test_a_plan_that_fits_a_larger_batch_stays(tmp_path, caplog):
    """A step with it is simulated, and nothing is solved."""
    caplog.set_level("INFO", logger="rmm_linear")
    trainer, callback, _ = fitting(tmp_path, {"memory": 0.8, "allow": ["recompute"]}, max_steps=3)
    cut(trainer, [18, 20, 20])
    trainer.train()
    report = callback.fit_report
    assert trainer.model.rmm_plan is report.plan
    first, second = entries(trainer)
    assert (first["elements"], second["elements"]) == (72, 80)
    assert first["peak_bytes"] <= second["peak_bytes"] <= first["budget_bytes"] == second["budget_bytes"]
    (said,) = [message for message in caplog.messages if "the plan stays" in message]
    assert said.startswith("A batch of 80 elements came after a plan for 72: a step takes ")
    assert not [message for message in caplog.messages if "planned again" in message]
