"""TRL's trainers with their defaults, which turn checkpointing on and count in their losses: one callback serves them.

What takes long is marked ``stack``; of each trainer, a run whose plan changes nothing is not.
"""

import pytest
import torch
from helpers import tiny_model
from trl_helpers import trl_trainer

from rmm_linear import RMMConfig, convert, revert
from rmm_linear.context.checkpointing import is_checkpointed
from rmm_linear.integrations.fit_training import example_of
from rmm_linear.integrations.transformers import RMMCallback

KINDS = {
    "sft": {},
    "sft packed": {"packing": True},
    "dpo": {},
    "reward": {},
    "grpo": {},
}
REST = ("sft packed", "dpo", "reward")
OFF = "rmm_linear: activation checkpointing (which TRL turns on by default) is off in this training, as "
TIMES = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "step_time"}

pytestmark = pytest.mark.filterwarnings("ignore")


def train(kind, folder, callback=None, **settings):
    torch.manual_seed(0)
    callbacks = [] if callback is None else [callback]
    trainer = trl_trainer(kind.split()[0], folder, callbacks=callbacks, **KINDS[kind], **settings)
    trainer.train()
    return trainer


def logs(trainer):
    return [
        {name: value for name, value in entry.items() if name not in TIMES}
        for entry in trainer.state.log_history
        if "loss" in entry or "train_loss" in entry
    ]


@pytest.mark.parametrize("kind", ["sft", "grpo", *(pytest.param(k, marks=pytest.mark.stack) for k in REST)])
def test_a_plan_that_changes_nothing_leaves_no_trace_in_the_logs(kind, tmp_path, capsys):
    """To the bit: TRL counts tokens, entropies and rewards wherever its loss is computed."""
    plain = logs(train(kind, tmp_path / "plain", gradient_checkpointing=False))
    callback = RMMCallback(fit={"memory": "1GB"})
    trainer = train(kind, tmp_path / "fit", callback)
    assert callback.fit_report.is_exact
    assert logs(trainer) == plain
    out = capsys.readouterr().out
    assert "rmm_linear: planning a fit for " in out
    assert "Note: Activation checkpointing was on, and is off as long as the plan is" in out
    # GRPO's loss reads numbers for its metrics; SFT's is the model's own.
    assert any("each was guessed to be 1" in note for note in callback.fit_report.notes) or kind.startswith("sft")
    assert not is_checkpointed(trainer.model)
    revert(trainer.model)
    assert is_checkpointed(trainer.model)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversion_counts_what_is_trained_and_no_more(kind, tmp_path, capsys):
    plain = logs(train(kind, tmp_path / "plain"))
    callback = RMMCallback(convert=RMMConfig(min_rows=4))
    found = logs(train(kind, tmp_path / "converted", callback))
    counts = [name for name in plain[0] if name.startswith(("num_", "completions/"))]
    assert counts
    assert [[entry.get(name) for name in counts] for entry in found][:1] == [[plain[0][name] for name in counts]]
    assert [entry.keys() for entry in found] == [
        entry.keys() for entry in plain
    ]  # the log of ratios takes none of them
    out = capsys.readouterr().out
    assert f"{OFF}compressed activations save the memory in its place" in " ".join(out.split())
    assert "checkpointing recomputes" not in out
    assert callback.report.memory.after < 0.4 * callback.report.memory.before


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_the_loss_of_any_batch_is_known_for_the_models_own(seed, tmp_path):
    """In bfloat16, where TRL adds up the loss in another order than the model; the example is how TRL calls it."""
    trainer = trl_trainer("sft", tmp_path, seed=seed, bf16=True)
    found = example_of(trainer, trainer.model, trainer._prepare_inputs(next(iter(trainer.get_train_dataloader()))))
    assert found["fused_lm_head"] is True
    assert torch.is_tensor(found["labels"])


@pytest.mark.stack
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_batches_of_any_size_are_planned_for_in_bfloat16(seed, tmp_path):
    """TRL adds up the loss in another order than the model, and reads numbers of it."""
    callback = RMMCallback(fit={"memory": 0.95, "allow": ["keep", "recompute"]})
    trainer = train("sft", tmp_path, callback, seed=seed, bf16=True, max_steps=3)
    report = callback.fit_report
    assert report.fits
    assert not report.is_exact
    assert report.measured_peak == pytest.approx(report.simulated_peak, rel=0.02)
    assert len(logs(trainer)) == 4


@pytest.mark.stack
@pytest.mark.parametrize("kind", KINDS)
def test_every_trainer_is_planned_for_by_its_own_loss(kind, tmp_path, caplog):
    callback = RMMCallback(fit=0.8)
    trainer = train(kind, tmp_path, callback, max_steps=4)
    report = callback.fit_report
    assert report.fits
    assert not report.is_exact
    assert report.measured_peak == pytest.approx(report.simulated_peak, rel=0.02)
    assert not [message for message in caplog.messages if "planning failed" in message]
    assert len(logs(trainer)) == 5


@pytest.mark.stack
def test_adapters_that_come_after_convert_are_named(tmp_path, caplog):
    model = tiny_model("llama")
    convert(model, min_rows=4)
    train("sft", tmp_path, model=model, gradient_checkpointing=False)
    (said,) = [one for one in caplog.messages if "came later, as adapters do" in one]
    assert "this one trains 8 that" in said
    assert "lora_A.default" in said


@pytest.mark.stack
def test_checkpointing_is_kept_where_it_is_asked_for_and_named_where_nothing_fits(tmp_path, caplog):
    callback = RMMCallback(fit={"memory": "100KB", "allow": ["keep", "recompute"], "checkpointing": "keep"})
    with pytest.raises(
        ValueError, match=r"memory='100KB' cannot be met.* Activation checkpointing is on: .*\"replace\""
    ):
        train("sft", tmp_path, callback)


@pytest.mark.stack
def test_a_subscript_of_a_trainer_class_does_the_same(tmp_path):
    trainer = trl_trainer("sft", tmp_path, rmm=RMMConfig(min_rows=4))
    trainer.train()
    assert repr(type(trainer)) == "RMMTrainer[SFTTrainer]"
    assert any("lora_A" in name for name in trainer.rmm.report.converted)
