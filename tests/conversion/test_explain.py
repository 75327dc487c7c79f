"""explain and conversion by example: what changes, what does not and why, and that nothing is disturbed."""

import json

import pytest
import torch
from cases import ROUGH
from helpers import Shapes, snapshot, tiny_model
from torch import nn

from benchmarks.noise.blocks import families
from rmm_linear import RMMLinear, convert
from rmm_linear.activations import attention_interface
from rmm_linear.conversion import packed
from rmm_linear.memory import Explanation, Keeper, OperationMemory, explain

FAMILIES = families(width=128, batch=5, length=64)  # logits are taken in chunks of 256 rows where there are more


def test_explain_says_what_changes_and_why_not():
    model, x = Shapes(), torch.randn(100, 16)
    size, sketch = 100 * 16 * 4, 25 * 16 * 4 + 8
    found = explain(model, x, **ROUGH)
    assert (found.layers["inner"].before, found.layers["inner"].after) == (size, sketch)
    assert (found.layers["left"].before, found.layers["left"].after) == (size, sketch)
    assert (found.layers["right"].before, found.layers["right"].after) == (0, 0)
    assert found.layers["after"].reason == "Tanh saves this tensor anyway"
    assert found.layers["after"].after == 0  # it is exact, as in training from its second step on
    assert found.before == 5 * size
    assert found.after == 3 * size + 2 * sketch
    linear, other = OperationMemory(2 * size, 2 * sketch), OperationMemory(3 * size, 3 * size)
    assert found.operations == {"linear": linear, "other": other}
    assert found.stand_ins == 2 * sketch
    assert f"saved_before={5 * size}" in str(found)
    assert found.to_dict()["layers"]["after"]["reason"] == found.layers["after"].reason


def test_logits_are_not_read_and_their_loss_belongs_to_them():
    """What is left of 300 rows of logits over 64 classes are the gradients that the loss makes in its forward pass."""
    model = tiny_model("llama")
    ids = torch.randint(3, 64, (10, 30))
    found = explain(model, {"input_ids": ids, "labels": ids}, operations=("logits",))
    memory, head = found.operations["logits"], model.lm_head.weight
    assert memory.before > 290 * 64 * 4
    assert memory.after < 300 * head.shape[1] * 4 + head.numel() * 4 + 1000
    assert not any("loss" in keeper.reason for keeper in found.remaining)
    exact = explain(model, {"input_ids": ids, "labels": ids}, operations=("norm",))
    (loss,) = [keeper for keeper in exact.remaining if keeper.modules == ""]
    why = "LlamaForCausalLM: LogSoftmax and NllLoss, the loss over classes; operations does not have 'logits'"
    assert loss.reason == why


def test_modules_that_differ_in_numbers_are_one_keeper_and_the_report_has_their_reason():
    model, ids = tiny_model("bert", dropout=0.0), torch.randint(3, 64, (8, 32))
    model.set_attn_implementation("eager")
    options = {"exclude_modules": ["intermediate.dense", "attention.self"], "operations": ("linear", "attention")}
    found = explain(model, {"input_ids": ids}, **options)
    by_name = {keeper.modules: keeper for keeper in found.remaining}
    own = by_name["bert.encoder.layer.{0-1}.attention.self"]
    assert own.reason == "BertSelfAttention: Bmm and Softmax, not converted: in exclude_modules"
    assert own.bytes > 2 * (8 * 2 * 32 * 32 * 4)  # two layers with their probabilities
    excluded = by_name["bert.encoder.layer.{0-1}.intermediate.dense"]
    assert excluded.reason == "Linear: Addmm, not converted: in exclude_modules"
    activation = by_name["bert.encoder.layer.{0-1}.intermediate.intermediate_act_fn"]
    assert activation.reason == "GELUActivation: Gelu, operations does not have 'activation'"


def test_a_layer_of_few_rows_says_so():
    found = explain(Shapes(), torch.randn(20, 16), **{**ROUGH, "min_rows": 64})
    by_name = {keeper.modules: keeper.reason for keeper in found.remaining}
    assert by_name["left"] == "Linear: Addmm, the layer sees 20 rows and stays exact"
    assert by_name["inner"] == "Linear: Addmm, the batch itself, which is in memory anyway"
    assert found.stand_ins == 0


def test_an_attention_that_stays_exact_has_its_own_reason(monkeypatch):
    monkeypatch.setattr(attention_interface, "_UNSUPPORTED", ("position_bias",))
    monkeypatch.setattr(packed, "_is_light", lambda module: False)  # else it would train as a region
    ids = torch.randint(3, 64, (4, 20))
    found = explain(tiny_model("t5", dropout=0.0), {"input_ids": ids, "labels": ids})
    reasons = [keeper.reason for keeper in found.remaining if keeper.modules.endswith("Attention")]
    assert len(reasons) == 3
    assert all("its attention stays exact: it is called with position_bias" in reason for reason in reasons)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_nothing_large_is_left_without_a_reason_that_names_it(name):
    """Every reason names an operator, a class of the model and, in words of its own, what is saved."""
    make, batch = FAMILIES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
    classes = {type(module).__name__ for module in model.modules()}
    found = explain(model, batch)
    assert sum(entry.before for entry in found.operations.values()) == found.before
    assert sum(entry.after for entry in found.operations.values()) == found.after
    assert found.stand_ins + sum(keeper.bytes for keeper in found.remaining) == found.after
    assert [keeper.bytes for keeper in found.remaining] == sorted((k.bytes for k in found.remaining), reverse=True)
    assert all(keeper.share == keeper.bytes / found.before for keeper in found.remaining)
    large = [keeper for keeper in found.remaining if keeper.share > 0.02]
    for keeper in large:
        kind, what = keeper.reason.split(": ", 1)
        assert kind in classes
        assert "nothing compresses it" not in what
        assert all(len(part.split(", ", 1)[1].split()) > 2 for part in what.split("; "))
    assert len(large) == {"ViT": 1}.get(name, 0)
    text = str(found)
    assert all("".join(keeper.reason.split()) in "".join(text.split()) for keeper in large)
    assert found.after < 0.25 * found.before


def test_keepers_below_two_percent_are_summed_where_it_is_printed():
    found = Explanation({}, 1000, 500, {}, [Keeper("a", 400, 0.4, "A: B, c"), *[Keeper("b", 10, 0.01, "")] * 3], 70)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in str(found).splitlines() if "|" in line]
    assert ["a", "400", "40.0", "A: B, c"] in rows
    assert ["and 3 more", "30", "3.0", "each below 2%, see table()"] in rows
    assert found.table().count("| b ") == 3


def test_a_batch_on_which_nothing_is_saved_says_so():
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    model.requires_grad_(False)
    found = explain(model, torch.randn(100, 16))
    assert (found.before, found.after, found.remaining, found.stand_ins) == (0, 0, [], 0)
    assert str(found).splitlines()[:2] == [
        "rmm_linear: saved_before=0 saved_after=0 share=0.000",
        "Nothing is saved for the backward pass of this batch: no output of the model needs a gradient.",
    ]


def test_an_explanation_is_plain_json():
    found = explain(Shapes(), torch.randn(100, 16), **ROUGH)
    read = json.loads(json.dumps(found.to_dict()))
    assert read["operations"]["linear"] == {"before": 12800, "after": found.operations["linear"].after}
    assert read["remaining"][0] == vars(found.remaining[0])
    assert read["stand_ins"] == found.stand_ins


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_what_a_region_of_attention_saves_belongs_to_it_and_not_to_the_linear_layer_that_runs_then(architecture):
    model, ids = tiny_model(architecture, dropout=0.0), torch.randint(3, 64, (8, 32))
    model.set_attn_implementation("eager")
    found = explain(model, {"input_ids": ids, "labels": ids})
    sketches = sum(layer.after for layer in found.layers.values())
    assert found.operations["linear"].after == sketches < 0.2 * found.operations["linear"].before
    assert found.operations["attention"].after > 0
    for name, layer in found.layers.items():  # 3 bits for 32, of an input of 32 columns at most
        assert layer.after < 0.2 * 8 * 32 * 32 * 4, name


def test_explain_does_not_log_as_if_it_converted(caplog):
    caplog.set_level("INFO", "rmm_linear")
    explain(Shapes(), torch.randn(100, 16), **ROUGH)
    assert not caplog.messages


def test_explain_disturbs_nothing():
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 4)).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    explain(model, torch.ones(100, 16), **ROUGH)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(isinstance(module, RMMLinear) for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_explain_reverts_when_the_batch_is_bad():
    model = Shapes()
    with pytest.raises(RuntimeError):
        explain(model, torch.randn(3, 5), **ROUGH)
    assert not any(isinstance(module, RMMLinear) for module in model.modules())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_output_is_skipped_where_attention_keeps_it(attention):
    model = tiny_model("roberta", dropout=0.0)
    model.set_attn_implementation(attention)
    ids = torch.randint(3, 64, (8, 32))
    report = convert(model, example={"input_ids": ids}, **ROUGH)
    outputs = [name for name in report.skipped if name.endswith("attention.output.dense")]
    if attention == "sdpa":
        assert len(outputs) == 2
        assert report.skipped[outputs[0]] == "scaled_dot_product_attention saves this tensor anyway"
    else:
        assert outputs == []
    assert sum("query" in name for name in report.converted) == 2


def test_an_example_on_which_nothing_is_saved_is_an_error():
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    with pytest.raises(
        ValueError, match=r"of the operations linear, and this model has none .*Tanh saves this tensor anyway"
    ):
        convert(model, example=torch.randn(100, 16), target_modules=["2"], **ROUGH)
    assert type(model[2]) is nn.Linear


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_an_example_that_fails_on_the_converted_model_leaves_nothing_half_done(error, monkeypatch, caplog):
    """Out of memory is the exact model, whose bytes stay unknown; after anything else the model is as it was."""
    model, batch = tiny_model("roberta").train(), {"input_ids": torch.randint(3, 64, (8, 32))}
    before = snapshot(model)

    def fails(*args):
        raise error

    monkeypatch.setattr("rmm_linear.conversion.convert.explained", fails)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            convert(model, example=batch, min_rows=4)
        assert snapshot(model) == before
    else:
        report = convert(model, example=batch, min_rows=4)
        assert report.memory is None
        assert "the exact one runs out of memory" in caplog.text
        assert snapshot(model) != before
