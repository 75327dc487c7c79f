"""Conversion of activations, norms, attention and dropout: what is chosen, what is said, what is undone."""

import pytest
import torch
from helpers import batch_of, tiny_model
from torch import nn

from rmm_linear import convert, revert
from rmm_linear.activations import attention_interface
from rmm_linear.config import OPERATIONS
from rmm_linear.conversion import packed
from rmm_linear.memory import track_saved

ARCHITECTURES = ["roberta", "bert", "gpt2", "llama", "t5"]


def logits(model, architecture):
    torch.manual_seed(5)
    return model(**batch_of(architecture)).logits


def saved(model, architecture):
    with track_saved(model) as ledger:
        output = logits(model, architecture)
    count = ledger.total
    del output
    return count


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_operations_leave_the_outputs_alone_and_save_less(architecture, dropout):
    model = tiny_model(architecture, dropout=dropout)
    classes = {name: type(module) for name, module in model.named_modules()}
    implementation = model.config._attn_implementation
    expected, before = {}, saved(model.train(), architecture)
    for mode in (True, False):
        expected[mode] = logits(model.train(mode), architecture)
    report = convert(model, min_rows=4)
    for mode in (True, False):
        assert torch.equal(logits(model.train(mode), architecture), expected[mode]), mode
    # Of 16 columns, one row of a sketch in 4 bits takes 8 bytes and 4 of its scale; heads and embeddings are left.
    assert saved(model.train(), architecture) < 0.6 * before
    assert {entry.operation for entry in report.packed.values()} >= {"norm", "attention", "activation"}
    revert(model)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert model.config._attn_implementation == implementation
    assert not [key for module in model.modules() for key in vars(module) if key.startswith("rmm_")]
    assert torch.equal(logits(model.train(), architecture), expected[True])


def test_one_operation_at_a_time():
    for operation in (one for one in OPERATIONS if one != "pooling"):  # which no text model has
        architecture = {"logits": "llama", "experts": "mixtral", "convolution": "vit"}.get(operation, "roberta")
        report = convert(tiny_model(architecture), operations=operation)
        assert {entry.operation for entry in report.packed.values()} == ({operation} - {"linear"})
        assert bool(report.converted) == (operation == "linear")


def test_patterns_exclude_and_override():
    model = tiny_model("roberta")
    report = convert(
        model,
        exclude_modules=r".*layer\.0\..*",
        overrides={"LayerNorm": {"norm_bits": 8}, r".*intermediate_act_fn": {"activation_bits": 8}},
    )
    assert not any("layer.0." in name for name in (*report.packed, *report.converted))
    assert report.skipped["roberta.encoder.layer.0.output.LayerNorm"] == "in exclude_modules"
    saved = {name: entry.saved for name, entry in report.packed.items()}
    assert saved["roberta.encoder.layer.1.output.LayerNorm"] == "its rows, 8 bits"
    assert saved["roberta.encoder.layer.1.intermediate.intermediate_act_fn"] == "its derivative, 8 bits"


def test_the_report_names_every_module_and_what_it_saves():
    report = convert(tiny_model("llama"), dry_run=True)
    text = " ".join(str(report).split())
    for words in ("two products of the gate, 4 bits", "its rows, 3 bits", "queries, keys and values, 4 bits"):
        assert words in text
    # The activation inside of a gated MLP saves nothing of its own.
    assert not any(name.endswith("act_fn") for name in report.packed)
    assert report.to_dict()["packed"]["model.norm"] == {
        "type": "LlamaRMSNorm",
        "operation": "norm",
        "saved": "its rows, 3 bits",
    }
    assert report.context is None


def test_the_activation_of_a_gated_mlp_that_stays_is_packed_by_itself():
    report = convert(tiny_model("llama"), exclude_modules=["mlp"])
    assert report.skipped["model.layers.0.mlp"] == "in exclude_modules"
    assert report.packed["model.layers.0.mlp.act_fn"].saved == "its derivative, 4 bits"
    assert "model.layers.0.mlp.act_fn" not in convert(tiny_model("llama")).packed


def test_an_activation_that_is_excluded_takes_its_gated_mlp_with_it():
    report = convert(tiny_model("llama"), exclude_modules=["act_fn"])
    assert not any("mlp" in name for name in report.packed)


def test_modules_are_tried_for_the_selected_operations_alone():
    model, calls = tiny_model("llama"), []
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: calls.append(module))
    convert(model, operations=("linear", "dropout", "logits"))
    assert not calls


def test_a_module_whose_forward_was_replaced_is_skipped():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    model[1].forward = lambda x: x
    report = convert(model)
    assert list(report.packed) == ["2"]
    assert report.skipped["1"].startswith("its forward method was replaced")


def test_a_model_without_linear_layers_is_converted_too():
    model = nn.Sequential(nn.LayerNorm(8), nn.GELU())
    assert list(convert(model).packed) == ["0", "1"]
    revert(model)
    with pytest.raises(ValueError, match="of the operations dropout, and this model has none"):
        convert(model, operations="dropout")
    with pytest.raises(ValueError, match="needs a model with modules inside"):
        convert(model, operations="linear")


def test_a_converted_model_is_refused_and_part_of_it_reverted():
    model = tiny_model("roberta")
    convert(model, operations="norm")
    with pytest.raises(ValueError, match=r"not converted yet.*revert\(model\) first"):
        convert(model)
    revert(model.roberta.encoder)
    assert type(model.roberta.encoder.layer[0].output.LayerNorm) is nn.LayerNorm
    assert type(model.roberta.embeddings.LayerNorm) is not nn.LayerNorm
    revert(model)
    with pytest.raises(ValueError, match="without converted modules"):
        revert(model)


def test_an_attention_that_stays_exact_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(attention_interface, "_UNSUPPORTED", ("position_bias",))
    monkeypatch.setattr(packed, "_is_light", lambda module: False)  # else it would train as a region
    model = tiny_model("t5", dropout=0.0).train()
    convert(model, min_rows=4)
    for _ in range(2):
        logits(model, "t5")
    said = [message for message in caplog.messages if "stays exact" in message]
    assert said == [
        "The attention of encoder.block.0.layer.0.SelfAttention stays exact and saves what it saved before: it is "
        "called with position_bias. Further modules with the same reason are not named."
    ]
