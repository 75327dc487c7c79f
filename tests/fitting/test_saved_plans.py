"""Plans of fitted models are saved with the weights and in checkpoints, and applied again."""

import json
import shutil

import pytest
import torch
from fit_helpers import RECOMPUTED, elements, fitting
from helpers import gradients, loss_of, tiny_model, token_ids
from torch import nn
from trainer_helpers import make_trainer, weights

import rmm_linear
from rmm_linear import convert, sketch_state
from rmm_linear.integrations.pretrained import convert_as_saved, save_conversion
from rmm_linear.integrations.transformers import RMMCallback, SketchStateCallback
from rmm_linear.planning import BlockPlan, load_plan

CONVERTED = {"allow": ["keep", "sketch", "pack"], "max_noise": 1000.0}
SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


def planned(memory=0.8, allow=("keep", "recompute"), **options):
    model = tiny_model("roberta", dropout=0.0).train()
    ids = token_ids(16, 20)
    batch = {"input_ids": ids, "labels": ids[:, 0] % 2}
    return model, rmm_linear.fit(model, batch, memory, allow=allow, **options).plan


@pytest.fixture(scope="module")
def recomputing():
    return planned()[1].to_dict()


@pytest.fixture(scope="module")
def converting():
    plan = planned(0.6, **CONVERTED)[1]
    assert plan.config is not None
    return plan.to_dict()


def fitted(fields):
    """A new model with a plan."""
    model = tiny_model("roberta", dropout=0.0).train()
    BlockPlan.from_dict({key: value for key, value in json.loads(json.dumps(fields)).items() if key != "format"}).apply(
        model
    )
    return model


def step(model):
    model.zero_grad()
    torch.manual_seed(3)
    loss_of(model, "roberta").backward()
    return gradients(model)


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def done(plan):
    return [(block.name, block.option, block.inner) for block in plan.blocks]


@pytest.mark.thorough
def test_a_plan_without_conversions_is_a_file_of_its_own(tmp_path, recomputing):
    model = fitted(recomputing)
    model.save_pretrained(tmp_path)
    save_conversion(nn.DataParallel(model), tmp_path)
    assert not (tmp_path / "rmm_config.json").exists()
    loaded = type(model).from_pretrained(tmp_path).train()
    report = convert_as_saved(loaded, tmp_path)
    assert not report.converted
    assert not report.packed
    assert done(loaded.rmm_plan) == done(model.rmm_plan)
    assert done(load_plan(tmp_path / "rmm_plan.json")) == done(model.rmm_plan)
    assert same(step(loaded), step(model))
    rmm_linear.revert(loaded)
    assert "rmm_plan" not in vars(loaded)


def test_a_plan_with_conversions_restores_them_and_their_state(tmp_path, converting):
    model = fitted(converting)
    step(model)
    save_conversion(model, tmp_path)
    assert (tmp_path / "rmm_config.json").is_file()
    twin = tiny_model("roberta", dropout=0.0).train()
    twin.load_state_dict(model.state_dict())
    report = convert_as_saved(twin, tmp_path)
    assert report.to_dict() == model.rmm_plan.conversion.to_dict()
    assert done(twin.rmm_plan) == done(model.rmm_plan)
    assert sketch_state(twin) == sketch_state(model)
    assert same(step(twin), step(model))


def test_what_an_earlier_model_left_is_removed(tmp_path, recomputing, converting):
    save_conversion(fitted(converting), tmp_path)
    save_conversion(fitted(recomputing), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rmm_plan.json"]
    model = tiny_model("roberta")
    convert(model)
    save_conversion(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rmm_config.json"]
    assert convert_as_saved(tiny_model("roberta"), tmp_path).converted


def test_files_of_two_models_are_refused(tmp_path, recomputing):
    model = tiny_model("roberta")
    convert(model)
    save_conversion(model, tmp_path)
    (tmp_path / "rmm_plan.json").write_text(json.dumps(recomputing))
    fresh = tiny_model("roberta")
    with pytest.raises(ValueError, match=r"rmm_config\.json and rmm_plan\.json next to it must be of one model"):
        convert_as_saved(fresh, tmp_path)
    assert "rmm_plan" not in vars(fresh)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda fields: "", "is no plan"),
        (
            lambda fields: json.dumps({**fields, "blocks": [{**fields["blocks"][0], "name": "elsewhere"}]}),
            r"cannot train by .*rmm_plan\.json: The model has no module 'elsewhere'",
        ),
    ],
)
def test_damaged_plans_are_named_and_leave_the_model_as_it_was(tmp_path, recomputing, damage, text):
    (tmp_path / "rmm_plan.json").write_text(damage(recomputing))
    model = tiny_model("roberta")
    with pytest.raises(ValueError, match=text) as caught:
        convert_as_saved(model, tmp_path)
    assert "rmm_plan.json" in str(caught.value)
    assert "rmm_plan" not in vars(model)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("fit", [RECOMPUTED, {"memory": 0.7, **CONVERTED}], ids=["recomputed", "converted"])
def test_a_resumed_run_trains_by_the_plan_of_its_checkpoint(tmp_path, fit, capsys):
    """And ends with the weights of the run that was not interrupted."""
    whole, _, _ = fitting(tmp_path, fit, **SAVING)
    whole.train()
    checkpoint = tmp_path / "checkpoint-2"
    assert (checkpoint / "rmm_plan.json").is_file()
    assert not list(tmp_path.glob("rmm_plan-*"))
    resumed, callback, _ = fitting(tmp_path, fit, **SAVING)
    capsys.readouterr()
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert "(of the checkpoint)" in capsys.readouterr().out
    assert callback.fit_report is None
    assert done(resumed.model.rmm_plan) == done(whole.model.rmm_plan)
    assert elements(resumed) == elements(whole) == [80]
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))


def test_another_budget_plans_a_resumed_run_anew(tmp_path, caplog):
    whole, _, _ = fitting(tmp_path, RECOMPUTED, **SAVING)
    whole.train()
    resumed, callback, _ = fitting(tmp_path, {**RECOMPUTED, "memory": 1.0}, **SAVING)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert any("it is planned again" in message for message in caplog.messages)
    assert resumed.model.rmm_plan is callback.fit_report.plan
    assert callback.fit_report.is_exact


@pytest.mark.thorough
def test_the_checkpoints_plan_replaces_another_one(tmp_path, caplog, recomputing):
    """Of a model that was fitted before the Trainer was made, with the callback that saves alone."""
    trainers = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        trainer, _, _ = make_trainer(tmp_path, config=None, **SAVING)
        trainer.add_callback(SketchStateCallback())
        if resume is None:
            trainer.model = fitted(recomputing)
        else:
            batch = dict(next(iter(trainer.get_train_dataloader())))
            rmm_linear.fit(trainer.model, batch, 1.0)
        trainer.model_wrapped = trainer.model
        trainer.train(resume_from_checkpoint=resume)
        trainers.append(trainer)
    first, second = trainers
    assert done(first.model.rmm_plan) == done(second.model.rmm_plan)
    (said,) = [message for message in caplog.messages if "The model's plan is replaced" in message]
    assert "rmm_plan.json" in said


@pytest.mark.thorough
def test_a_checkpoint_that_was_interrupted_has_its_plan_beside_it(tmp_path):
    whole, _, _ = fitting(tmp_path, RECOMPUTED, **SAVING)
    whole.train()
    checkpoint = tmp_path / "checkpoint-2"
    (checkpoint / "rmm_plan.json").rename(tmp_path / "rmm_plan-2.json")
    resumed, callback, _ = fitting(tmp_path, RECOMPUTED, **{**SAVING, "max_steps": 3})
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert callback.fit_report is None
    assert done(resumed.model.rmm_plan) == done(whole.model.rmm_plan)


def offloading(fields, folder):
    return {**fields, "folder": str(folder), "blocks": [{**row, "choice": "offload"} for row in fields["blocks"]]}


def test_a_saved_plan_offloads_where_the_caller_says(tmp_path, recomputing):
    save_conversion(fitted(offloading(recomputing, tmp_path / "theirs")), tmp_path)
    model = tiny_model("roberta", dropout=0.0).train()
    with pytest.raises(ValueError, match=r"rmm_plan\.json: .*offload_folder=\.\.\. to convert_as_saved"):
        convert_as_saved(model, tmp_path)
    assert "rmm_plan" not in vars(model)
    convert_as_saved(model, tmp_path, offload_folder=tmp_path / "ours")
    assert model.rmm_plan.folder == str(tmp_path / "ours")


@pytest.mark.thorough
def test_a_checkpoint_of_the_output_folder_offloads_as_before(tmp_path, recomputing):
    theirs, ours = str(tmp_path / "theirs"), str(tmp_path / "ours")

    def trained(callback, resume=None, model=None):
        trainer, _, _ = make_trainer(tmp_path / "out", config=None, resume_from_checkpoint=resume, **SAVING)
        trainer.add_callback(callback)
        if model is not None:
            trainer.model = trainer.model_wrapped = model
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model.rmm_plan.folder

    assert trained(SketchStateCallback(), model=fitted(offloading(recomputing, theirs))) == theirs
    own, moved = tmp_path / "out" / "checkpoint-2", tmp_path / "moved"
    shutil.copytree(own, moved)
    assert trained(SketchStateCallback(), str(own)) == theirs
    with pytest.raises(ValueError, match=r"rmm_plan\.json: .*Give folder=\.\.\. to fit"):
        trained(SketchStateCallback(), str(moved))
    assert trained(RMMCallback(fit={"memory": "least", "folder": ours}), str(moved)) == ours
