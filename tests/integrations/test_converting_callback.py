"""RMMCallback converts a model when training begins, and its first step says what the whole model saves."""

import dataclasses

import pytest
import torch
from helpers import tiny_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from trainer_helpers import Sentences, make_trainer, probed, weights
from transformers import Trainer, TrainingArguments

from rmm_linear import RMMConfig, convert
from rmm_linear._support.tables import WIDTH, wrapped
from rmm_linear.context.checkpointing import is_checkpointed
from rmm_linear.conversion.explained import explained
from rmm_linear.integrations.transformers import RMMCallback

LAYER = "roberta.encoder.layer.1.intermediate.dense"


def test_medians_and_totals_are_logged_by_default(tmp_path):
    trainer, _, recorder = probed(tmp_path, every=2, whole_every=1, max_steps=2, per_layer=False)
    trainer.train()
    (names,) = [set(entry) for entry in recorder.logs if "rmm/noise" in entry]
    assert {name.count("/") for name in names if name.startswith("rmm/noise_whole")} == {2}
    assert {name for name in names if "roberta" in name} == set()


def test_the_first_step_prints_what_the_whole_model_saves(tmp_path, capsys):
    """And leaves no trace: neither in the weights, nor in what is probed or measured on the same step."""
    found = []
    for known in (False, True):
        trainer, callback, recorder = probed(tmp_path / str(known), every=1, max_steps=2)
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        memory = explained(trainer.model, callback.report, batch)
        if known:
            callback.report = dataclasses.replace(callback.report, memory=memory)
        capsys.readouterr()
        trainer.train()
        out = capsys.readouterr().out
        assert out.count("saved for backward: ") == 1
        found.append((weights(trainer), callback.results.rows, recorder.logs[0]["rmm/kept_bytes"], out))
    (first, rows, kept, out), (second, other_rows, other_kept, _) = found
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert [dataclasses.astuple(row) for row in rows] == [dataclasses.astuple(row) for row in other_rows]
    assert kept == other_kept
    assert f"\n{wrapped(f'rmm_linear: {memory.line()}', 2)}\n" in out
    assert max(len(line) for line in out.splitlines() if not line.startswith("{'")) <= WIDTH  # the Trainer's


def test_it_converts_whatever_was_wrapped_before_and_logs(tmp_path, capsys):
    """Without a Trainer of its own: it finds the one that calls it. A second training finds the model converted."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(target_modules=["query", "value"])
    trainer, _, recorder = make_trainer(
        tmp_path, config=None, wrap=lambda model: get_peft_model(model, lora), max_steps=2
    )
    callback = RMMCallback(convert=RMMConfig(min_rows=4), every=2)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.trainer is trainer
    assert sum("lora_A" in name for name in callback.report.converted) == 4
    assert any("rmm/noise" in entry for entry in recorder.logs)
    assert "rmm_linear: converted=" in capsys.readouterr().out
    report = callback.report
    trainer.train()
    assert callback.report is report


def test_the_report_has_what_the_first_step_measured(tmp_path, capsys):
    """With checkpointing, which the Trainer turned on after the conversion; and no other way to measure is named."""
    trainer, report, _ = make_trainer(tmp_path, max_steps=1, gradient_checkpointing=True)
    callback = RMMCallback(trainer, report)
    trainer.add_callback(callback)
    trainer.train()
    printed = capsys.readouterr().out
    assert "example=batch" not in printed
    assert f"{wrapped(f'rmm_linear: {callback.report.memory.line()}', 2)}\n" in printed
    assert "\nWhile activation checkpointing recomputes" in printed
    assert callback.report.converted == report.converted
    assert "| operation " in str(callback.report)
    assert len(callback.report.checkpointed) == 12
    assert not report.checkpointed


def test_a_model_that_is_converted_stays_as_it_is(tmp_path, caplog):
    trainer, _, _ = make_trainer(tmp_path, max_steps=1)
    trainer.add_callback(RMMCallback(convert=RMMConfig(ratio=0.9)))
    trainer.train()
    assert any("converts models that are not converted, and this one is" in message for message in caplog.messages)
    assert trainer.model.get_submodule(LAYER).rmm_config.ratio == 0.25


def test_a_model_whose_adapters_came_after_convert_is_converted_again(tmp_path, caplog):
    """And the first step has nothing to say; with an earlier convert for a classifier that PEFT copies."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(target_modules=["query", "value"], task_type="SEQ_CLS")

    def wrap(model):
        convert(model, min_rows=4)
        return get_peft_model(model, lora)

    trainer, _, _ = make_trainer(tmp_path, config=None, wrap=wrap, max_steps=2)
    callback = RMMCallback(convert=RMMConfig(min_rows=4))
    trainer.add_callback(callback)
    trainer.train()
    assert sum("lora_" in name for name in callback.report.converted) == 8
    (said,) = caplog.messages
    assert said.startswith("The model trains 8 linear layers that came after its conversion, as adapters do (")
    assert said.endswith("RMMCallback(convert=...) reverts the model and converts it again.")
    caplog.clear()
    report = callback.report
    trainer.train()
    assert callback.report is report
    assert not caplog.messages


def test_checkpointed_layers_that_stay_exact_have_no_noise_to_warn_of(tmp_path, caplog):
    trainer, _, recorder = make_trainer(tmp_path, config=None, max_steps=2, gradient_checkpointing=True)
    config = RMMConfig(min_rows=1, ratio=0.02)
    trainer.add_callback(RMMCallback(convert=config, every=2, limit=1e-6, checkpointing="keep"))
    trainer.train()
    (noise,) = [entry["rmm/noise"] for entry in recorder.logs if "rmm/noise" in entry]
    assert noise == 0
    assert not any("the variance ratio, sketch to minibatch" in message for message in caplog.messages)


def test_a_callback_that_no_trainer_calls_says_so():
    with pytest.raises(RuntimeError, match="finds none among its callers"):
        RMMCallback().on_train_begin(None, None, None)


def test_one_callback_serves_several_trainers(tmp_path, capsys):
    callback, logs = RMMCallback(convert=RMMConfig(min_rows=4), every=1), []
    for name in ("first", "second"):
        trainer, _, recorder = make_trainer(tmp_path / name, config=None, max_steps=1)
        trainer.add_callback(callback)
        trainer.train()
        assert callback.trainer is trainer
        assert "training_step" not in vars(trainer)
        logs.append([entry for entry in recorder.logs if "rmm/noise" in entry])
    assert [len(entries) for entries in logs] == [1, 1]
    assert capsys.readouterr().out.count("saved for backward: ") == 2


def test_what_cannot_be_measured_does_not_end_the_training(tmp_path, capsys):
    """The exact model fails in the first step's extra passes, by memory or otherwise; the step itself runs."""
    for error, text in (
        (torch.OutOfMemoryError("full"), "MiB; the exact model runs out of memory on this batch"),
        (ZeroDivisionError("no"), "cannot be measured on this batch: ZeroDivisionError: no"),
    ):
        trainer, report, _ = make_trainer(tmp_path, max_steps=2)
        compute, calls = trainer.compute_loss, []

        def fails_once(*args, compute=compute, calls=calls, error=error, **kwargs):
            calls.append(kwargs.get("num_items_in_batch"))
            if len(calls) == 1:
                raise error
            return compute(*args, **kwargs)

        trainer.compute_loss = fails_once
        trainer.add_callback(RMMCallback(trainer, report))
        trainer.train()
        assert trainer.state.global_step == 2
        assert text in capsys.readouterr().out
        assert calls[0] == calls[-1]


def test_a_model_that_is_not_converted_is_named(tmp_path, caplog):
    trainer, _, _ = make_trainer(tmp_path, config=None, max_steps=1)
    trainer.add_callback(RMMCallback(trainer, every=1))
    trainer.train()
    assert any("the model is not converted" in message for message in caplog.messages)


@pytest.mark.parametrize(
    "name", ["gradient_checkpointing", pytest.param("activation_checkpointing", marks=pytest.mark.thorough)]
)
def test_checkpointing_is_off_while_training_and_leaves_no_trace(name, tmp_path, capsys):
    """Evaluations, saves and a resumed run in between: neither sees it, and the saved configuration is the same."""
    seen, configs = [], []
    for turned_on in (True, False):
        options = {
            name: turned_on,
            "save_strategy": "steps",
            "save_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 1,
        }
        folder = tmp_path / str(turned_on)
        for resume in (None, str(folder / "checkpoint-1")):
            trainer, _, _ = make_trainer(folder, config=None, max_steps=2, eval_dataset=Sentences(), **options)
            trainer.add_callback(RMMCallback(convert=RMMConfig(min_rows=4)))
            trainer.train(resume_from_checkpoint=resume)
            assert is_checkpointed(trainer.model) is turned_on
            seen.append(weights(trainer))
        configs.append((folder / "checkpoint-2" / "config.json").read_text())
    assert capsys.readouterr().out.count("is off in this training") == 2
    assert configs[0] == configs[1]
    assert all(torch.equal(one, other) for found in seen[1:] for one, other in zip(seen[0], found, strict=True))


def test_checkpointing_is_on_again_after_a_training_that_raised(tmp_path):
    """Its end is never told, and the next one begins; of torch's wrapper, too, which the Trainer does not know."""
    trainer, _, _ = make_trainer(tmp_path, config=None, max_steps=1)
    layers = trainer.model.roberta.encoder.layer
    layers[0] = checkpoint_wrapper(layers[0])
    function, step = layers[0].checkpoint_fn, trainer.training_step
    trainer.add_callback(RMMCallback(convert=RMMConfig(min_rows=4)))
    trainer.training_step = lambda *given: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.training_step = step
    trainer.train()
    assert layers[0].checkpoint_fn is function


def test_the_noise_is_measured_once_and_said(tmp_path, capsys, caplog):
    for ratio, warns in ((0.9, False), (0.05, True)):
        trainer, _, recorder = make_trainer(tmp_path, config=None, max_steps=4)
        trainer.add_callback(RMMCallback(convert=RMMConfig(min_rows=1, ratio=ratio)))
        trainer.train()
        assert [entry["step"] for entry in recorder.logs if "rmm/noise" in entry] == [3]
        out = capsys.readouterr().out
        assert max(len(line) for line in out.splitlines() if not line.startswith("{'")) <= WIDTH  # the Trainer's
        assert out.count("rmm_linear: variance ratio of linear layers, compression to minibatch: ") == 1
        said = " ".join(out.split())
        assert "(median of 14 layers in step 3; above 1 it costs accuracy)" in said
        advice = "leave linear layers exact: RMMConfig(operations=["
        assert said.count(advice) == sum(advice in one for one in caplog.messages) == int(warns)


def test_no_noise_is_said_where_all_linear_layers_save_their_rows_as_they_are(tmp_path, capsys):
    """As the head of a convolutional network: 0 would stand for what all others add."""
    trainer, _, recorder = make_trainer(tmp_path, config=None, max_steps=3)
    trainer.add_callback(RMMCallback(convert=RMMConfig(min_rows=10_000)))
    trainer.train()
    (logged,) = [set(entry) for entry in recorder.logs if "rmm/alpha" in entry]
    assert "rmm/noise" not in logged
    said = " ".join(capsys.readouterr().out.split())
    assert "compression to minibatch" not in said
    assert said.count("no linear layer of this model is compressed, so their variance ratio says nothing") == 1


class _Convolutions(nn.Module):
    """A network without a linear layer."""

    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU(), nn.Conv2d(16, 2, 1))

    def forward(self, pixels, labels=None):
        logits = self.parts(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("whole_every", [None, 1])
def test_a_model_without_linear_layers_trains(whole_every, tmp_path, capsys):
    rows = [{"pixels": torch.randn(3, 16, 16), "labels": torch.randint(0, 2, (16, 16))} for _ in range(16)]
    callback = RMMCallback(convert=RMMConfig(), every=2, whole_every=whole_every)
    settings = {"max_steps": 4, "report_to": "none", "use_cpu": True, "per_device_train_batch_size": 4}
    trainer = Trainer(
        _Convolutions(), TrainingArguments(tmp_path, **settings), train_dataset=rows, callbacks=[callback]
    )
    trainer.train()
    said = " ".join(capsys.readouterr().out.split())
    assert "saved for backward: " in said
    assert ("no linear layer of this model is compressed" in said) == (whole_every is None)
    assert any("rmm/noise_whole/all" in one for one in trainer.state.log_history) == (whole_every == 1)
    assert any("rmm/kept_bytes" in one for one in trainer.state.log_history)


def test_a_model_that_trains_nothing_is_named(caplog):
    model = tiny_model("roberta").requires_grad_(False)
    convert(model)
    assert [one for one in caplog.messages if one.startswith("No parameter of the model requires a gradient")]
