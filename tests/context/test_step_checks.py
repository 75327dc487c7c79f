"""A training step that saves nothing, or that trains layers that came after the conversion, says so once."""

import copy

import pytest
import torch
from helpers import batch_of, enable_checkpointing, tiny_model, token_ids
from torch import nn

from rmm_linear import convert, revert

FEW, LATE = (
    "stay exact, and all",
    "Sketches replace the input of linear layers that are in a model when it is converted",
)


def step(model, **inputs):
    model(**inputs).logits.sum().backward()


def test_a_head_among_many_modules_that_sees_few_rows_is_no_warning(caplog):
    model = tiny_model("resnet").train()
    convert(model)
    with caplog.at_level("INFO"):
        step(model, **batch_of("resnet"))
    assert {one.levelname for one in caplog.records if "at most min_rows=64 rows" in one.message} == {"INFO"}


def test_layers_that_see_few_rows_say_so_once(caplog):
    model = tiny_model("roberta").train()
    convert(model)
    for _ in range(2):
        step(model, input_ids=token_ids()[:2])
    (message,) = [one for one in caplog.messages if FEW in one]
    assert "at most min_rows=64 rows" in message
    assert "all 14 trained linear layers that ran (" in message
    assert ") saw 2 to 40, so no sketch was made" in message


def test_nothing_is_said_where_a_sketch_is_made(caplog):
    model = tiny_model("roberta").train()
    convert(model, min_rows=4)
    step(model, input_ids=token_ids())
    model.eval()(input_ids=token_ids()[:1])
    with torch.no_grad():
        model.train()(input_ids=token_ids()[:1])
    assert not caplog.messages


def test_passes_without_gradients_do_not_count(caplog):
    model = tiny_model("roberta").train()
    convert(model)
    with torch.no_grad():
        model(input_ids=token_ids())
    assert not caplog.messages
    step(model, input_ids=token_ids()[:2])
    assert len([one for one in caplog.messages if FEW in one]) == 1


def test_a_reentrant_checkpoint_hides_what_its_layers_see(caplog):
    model = tiny_model("roberta").train()
    convert(model, min_rows=30)
    enable_checkpointing(model, reentrant=True)
    step(model, input_ids=token_ids())
    assert not [one for one in caplog.messages if FEW in one]


@pytest.mark.parametrize("late", [True, False])
def test_adapters_that_came_after_convert_are_named(late, caplog):
    from peft import LoraConfig, get_peft_model

    model, lora = tiny_model("llama").train(), LoraConfig(target_modules=["q_proj", "v_proj"])
    if late:
        convert(model, min_rows=4)
        model = get_peft_model(model, lora)
    else:
        model = get_peft_model(model, lora)
        convert(model, min_rows=4)
    for _ in range(2):
        step(model.train(), input_ids=token_ids())
    said = [one for one in caplog.messages if LATE in one]
    assert len(said) == late
    if late:
        assert "this one trains 8 that came later, as adapters do (" in said[0]
        assert "model.layers.{0-1}.self_attn.q_proj.lora_A.default" in said[0]
        assert "Call rmm_linear.revert(model), then rmm_linear.convert after get_peft_model" in said[0]


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("roberta", {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"}),
        ("roberta", {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]}),
        ("llama", {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["down_proj"]}),
    ],
)
def test_a_head_that_peft_copies_does_not_hide_the_adapters_and_the_remedy_works(architecture, options, caplog):
    """The copy is a trained sketched layer."""
    from peft import LoraConfig, get_peft_model

    model = tiny_model(architecture).train()
    convert(model, min_rows=4)
    adapted = get_peft_model(model, LoraConfig(**options)).train()
    for _ in range(2):
        step(adapted, input_ids=token_ids())
    (said,) = caplog.messages
    assert LATE in said
    assert "trains 8 that came later" in said
    caplog.clear()
    revert(adapted)
    report = convert(adapted, min_rows=4)
    assert sum("lora_" in name for name in report.converted) == 8
    step(adapted, input_ids=token_ids())
    assert not caplog.messages


@pytest.mark.parametrize("options", [{"exclude_modules": ["classifier.dense"]}, {"target_modules": ["query"]}])
def test_layers_that_were_left_out_on_purpose_are_not_late(options, caplog):
    model = tiny_model("roberta").train()
    report = convert(model, min_rows=4, **options)
    assert report.skipped
    for name in report.converted:
        model.get_submodule(name).requires_grad_(False)
    step(model, input_ids=token_ids())
    revert(model.roberta.encoder.layer[0])
    step(model, input_ids=token_ids())
    assert not caplog.messages


def test_a_copy_of_a_converted_model_says_nothing_of_its_own_layers(caplog):
    model = tiny_model("roberta").train()
    convert(model, min_rows=4, target_modules=["query", "key", "value"])
    step(copy.deepcopy(model), input_ids=token_ids())
    assert not caplog.messages


def test_a_model_without_other_trained_layers_is_no_case_of_it(caplog):
    """All linear layers are frozen; norms are trained."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    convert(model, min_rows=1)
    model(torch.randn(16, 8)).sum().backward()
    assert not caplog.messages
    revert(model)


class Prompted(nn.Module):
    """A frozen model and what it is prompted with, as PEFT puts them together."""

    def __init__(self):
        super().__init__()
        self.base, self.prompt = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), nn.Embedding(4, 8)


def test_prompts_are_no_head(caplog):
    model = Prompted()
    model.base.requires_grad_(False)
    convert(model)
    assert not any("saves nothing" in one for one in caplog.messages)


@pytest.mark.parametrize("trained", ["classifier", "embedder", "all"])
def test_a_frozen_backbone_saves_nothing_and_is_named(trained, caplog):
    model = tiny_model("resnet").train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in (*name.split("."), "all"))
    convert(model)
    said = [one for one in caplog.messages if "What runs before it saves nothing, converted or not" in one]
    assert len(said) == (trained == "classifier")
