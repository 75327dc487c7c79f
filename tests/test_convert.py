"""convert and revert: the layers asked for, nothing else, in place, and all of it undone."""

import copy
import io
import json
import logging
import pickle

import pytest
import torch
from helpers import ARCHITECTURES, Mlp, gradients, seeds_of, tiny_model, token_ids
from torch import nn
from torch.nn.utils import parametrizations

from rmm_linear import RMMConfig, RMMLinear, convert, revert

EXACT = {"ratio": 1.0, "min_rows": 1}
ROUGH = {"kind": "countsketch", "ratio": 0.25, "min_rows": 1}


class Named(nn.Module):
    """Linear layers under names that are easily confused."""

    def __init__(self, *names):
        super().__init__()
        for name in names:
            *path, last = name.split(".")
            parent = self
            for part in path:
                if part not in dict(parent.named_children()):
                    parent.add_module(part, nn.Module())
                parent = getattr(parent, part)
            parent.add_module(last, nn.Linear(4, 4))


NAMES = ["out", "fout", "layer.0.out", "layer.0.dropout", "layer.1.out.dense", "layer.1.query", "layer.10.query"]


def snapshot(model):
    """Everything a failed or dry conversion must leave alone."""
    return [
        (n, type(m), set(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()
    ]


# Matching


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("all-linear", NAMES),
        (["out"], ["out", "layer.0.out"]),
        (["0.out"], ["layer.0.out"]),
        (["query"], ["layer.1.query", "layer.10.query"]),
        (["1.query"], ["layer.1.query"]),
        (["fout", "layer.0.out"], ["fout", "layer.0.out"]),
        ("out", ["out"]),
        (r".*out", ["out", "fout", "layer.0.out", "layer.0.dropout"]),
        (r"layer\.\d+\.(query|out)", ["layer.0.out", "layer.1.query", "layer.10.query"]),
    ],
)
def test_target_modules(target, expected):
    model = Named(*NAMES)
    report = convert(model, target_modules=target)
    assert sorted(report.converted) == sorted(expected)
    assert sorted(n for n, m in model.named_modules() if isinstance(m, RMMLinear)) == sorted(expected)
    assert {n: r for n, r in report.skipped.items() if n not in expected} == {
        n: "not in target_modules" for n in NAMES if n not in expected
    }


def test_a_module_that_no_linear_layer_is_does_not_match():
    model = nn.ModuleDict({"out": nn.LayerNorm(4), "dense": nn.Linear(4, 4)})
    with pytest.raises(ValueError, match="matches none"):
        convert(model, target_modules=["out"])


@pytest.mark.parametrize("exclude", [["out", "query"], r"(.*\.)?(out|query)"])
def test_exclude_modules(exclude):
    report = convert(Named(*NAMES), exclude_modules=exclude)
    assert sorted(report.converted) == sorted(["fout", "layer.0.dropout", "layer.1.out.dense"])
    assert set(report.skipped.values()) == {"in exclude_modules"}


def test_overrides_reach_their_layers():
    model = Named(*NAMES)
    overrides = {"layer.1.query": {"ratio": 0.5}, "query": {"kind": "rows"}, r"layer\.0\..*": {"min_rows": 9}}
    convert(model, kind="gaussian", ratio=0.1, min_rows=5, overrides=overrides)
    got = {
        n: (m.rmm_config.kind, m.rmm_config.ratio, m.rmm_config.min_rows)
        for n, m in model.named_modules()
        if isinstance(m, RMMLinear)
    }
    assert got == {
        "out": ("gaussian", 0.1, 5),
        "fout": ("gaussian", 0.1, 5),
        "layer.0.out": ("gaussian", 0.1, 9),
        "layer.0.dropout": ("gaussian", 0.1, 9),
        "layer.1.out.dense": ("gaussian", 0.1, 5),
        "layer.1.query": ("gaussian", 0.5, 5),
        "layer.10.query": ("rows", 0.1, 5),
    }


def test_keywords_replace_fields_of_the_config():
    report = convert(Mlp(), RMMConfig(kind="rows", ratio=0.5, min_rows=3), ratio=0.25)
    assert (report.config.kind, report.config.ratio, report.config.min_rows) == ("rows", 0.25, 3)
    assert {layer.config.ratio for layer in report.converted.values()} == {0.25}


# What is left alone


def test_subclasses_are_skipped_with_their_reason():
    model = nn.ModuleDict(
        {
            "plain": nn.Linear(4, 4),
            "attention": nn.MultiheadAttention(4, 2),
            "lazy": nn.LazyLinear(4),
            "bilinear": nn.Bilinear(4, 4, 4),
            "parametrized": parametrizations.weight_norm(nn.Linear(4, 4)),
            "conv": nn.Conv1d(4, 4, 1),
            "norm": nn.LayerNorm(4),
            "embedding": nn.Embedding(4, 4),
        }
    )
    types = {name: type(module) for name, module in model.named_modules()}
    report = convert(model)
    assert list(report.converted) == ["plain"]
    reason = "{} is a class of its own; only nn.Linear itself and Conv1D are converted"
    assert report.skipped["attention.out_proj"] == reason.format("NonDynamicallyQuantizableLinear")
    assert report.skipped["lazy"] == reason.format("LazyLinear")
    assert report.skipped["bilinear"] == reason.format("Bilinear")
    assert report.skipped["parametrized"] == reason.format("ParametrizedLinear")
    assert set(report.skipped) == {"attention.out_proj", "lazy", "bilinear", "parametrized"}
    assert {n: type(m) for n, m in model.named_modules() if n != "plain"} == {
        n: t for n, t in types.items() if n != "plain"
    }


def test_replaced_forward_is_skipped():
    model = Mlp()
    model.first.forward = lambda x: x
    assert "forward method was replaced" in convert(model).skipped["first"]


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_output_head_is_skipped_and_can_be_named(architecture):
    model = tiny_model(architecture)
    report = convert(model)
    assert report.skipped == {"lm_head": "the output head"}
    assert type(model.lm_head) is nn.Linear
    revert(model)
    assert list(convert(model, target_modules=["lm_head"]).converted) == ["lm_head"]


def test_every_linear_layer_of_the_architectures_is_in_the_report():
    for architecture in ARCHITECTURES:
        model = tiny_model(architecture)
        linears = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}
        report = convert(model, dry_run=True)
        assert set(report.converted) | set(report.skipped) == linears
        assert len(report.converted) >= 8


def test_gpt2_conv1d_becomes_its_twin_and_back():
    model = tiny_model("gpt2")
    report = convert(model, **ROUGH)
    twin = model.transformer.h[0].attn.c_attn
    assert type(twin).__name__ == "RMMConv1D"
    layer = report.converted["transformer.h.0.attn.c_attn"]
    assert (layer.type, layer.in_features, layer.out_features) == ("Conv1D", 16, 48)
    assert "countsketch" in repr(twin)
    revert(model)
    assert type(twin).__name__ == "Conv1D"


def test_conv1d_gradient_is_unbiased():
    """Its weight is (I, O): projection of the mean over 200 runs on the exact gradient, z = 4."""
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Conv1D(3, 5))
    x = torch.randn(4, 10, 5, generator=torch.Generator().manual_seed(0))
    model(x).square().sum().backward()
    exact = model[0].weight.grad.clone()
    convert(model, **ROUGH)
    torch.manual_seed(0)
    projections = []
    for _ in range(200):
        model.zero_grad()
        model(x).square().sum().backward()
        projections.append((model[0].weight.grad * exact).sum() / exact.square().sum())
    projections = torch.stack(projections)
    error = projections.std() / 200**0.5
    assert abs(projections.mean() - 1) < 4 * error
    assert error < 0.1


# Errors, after which nothing has changed


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"target_modules": ["quary"]},
            ValueError,
            r"got \['quary'\], which matches none. The nearest layers are (layer\.10?\.query, ){2}",
        ),
        ({"target_modules": "quer"}, ValueError, r"a regular expression for the whole name.*got 'quer'"),
        ({"exclude_modules": ".*"}, ValueError, "all 7 linear layers are skipped .*in exclude_modules"),
        (
            {"overrides": {"kuery": {"ratio": 0.5}}},
            ValueError,
            r"overrides\['kuery'\] must match a converted layer.*query",
        ),
        (
            {"overrides": {"query": {"ratio": 0.5}}, "target_modules": ["out"]},
            ValueError,
            r"overrides\['query'\] must match a converted layer",
        ),
        ({"overrides": {"query": {"ratio": 5}}}, ValueError, r"overrides\['query'\]: ratio must be in"),
        ({"ratio": 7}, ValueError, "ratio must be in"),
        ({"rate": 0.5}, TypeError, r"convert takes the fields of RMMConfig, got 'rate'. The fields are kind, ratio"),
        ({"config": {"ratio": 0.5}}, TypeError, r"config must be an RMMConfig or None, got dict"),
    ],
)
def test_errors_leave_the_model_alone(arguments, error, message):
    model = Named(*NAMES)
    before = snapshot(model)
    with pytest.raises(error, match=message):
        convert(model, **arguments)
    assert snapshot(model) == before


def test_no_match_names_the_three_nearest():
    model = Named("a.query", "b.query", "c.query", "a.value", "dense")
    with pytest.raises(ValueError, match="nearest layers are") as error:
        convert(model, target_modules=["querry"])
    nearest = str(error.value).rsplit("are ", 1)[1].rstrip(".").split(", ")
    assert sorted(nearest) == ["a.query", "b.query", "c.query"]


def test_one_entry_without_match_is_logged(caplog):
    with caplog.at_level(logging.WARNING, "rmm_linear"):
        report = convert(Named(*NAMES), target_modules=["query", "valeu"])
    assert len(report.converted) == 2
    assert "'valeu' matches no linear layer" in caplog.text


@pytest.mark.parametrize("model", [nn.Sequential(nn.ReLU()), nn.Module()])
def test_a_model_without_linears(model):
    with pytest.raises(ValueError, match="convert needs a model with linear layers"):
        convert(model)


def test_a_linear_layer_itself_is_told_of_from_linear():
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"Use RMMLinear.from_linear"):
        convert(layer)
    assert type(layer) is nn.Linear


def test_converting_twice_names_revert():
    model = Mlp()
    convert(model)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"Call rmm_linear.revert\(model\) first"):
        convert(model, ratio=0.5)
    assert snapshot(model) == before
    revert(model)
    assert len(convert(model, ratio=0.5).converted) == 2


def test_a_part_that_is_converted_already_is_found():
    model = Mlp()
    model.second = RMMLinear.from_linear(model.second)
    with pytest.raises(ValueError, match="not converted yet"):
        convert(model)
    assert type(model.first) is nn.Linear


def test_dry_run_changes_nothing_and_reports_the_same():
    model = tiny_model("roberta")
    before, state = snapshot(model), torch.get_rng_state()
    dry = convert(model, dry_run=True, **ROUGH)
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    wet = convert(model, **ROUGH)
    assert (dry.dry_run, wet.dry_run) == (True, False)
    assert dry.to_dict() | {"dry_run": False} == wet.to_dict()


def test_revert_of_an_exact_model_names_convert():
    with pytest.raises(ValueError, match=r"Call rmm_linear.convert first"):
        revert(Mlp())


# Everything else about the model stays


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_forward_is_the_same_to_the_bit(architecture, training):
    """With dropout: the sketches' random numbers must not shift its masks."""
    model, ids = tiny_model(architecture).train(training), token_ids()
    mask = torch.ones_like(ids)
    mask[1, 12:] = mask[3, 5:] = 0

    def run():
        torch.manual_seed(11)
        return model(input_ids=ids, attention_mask=mask).logits.detach()

    before = run()
    convert(model, **ROUGH)
    assert torch.equal(run(), before)
    revert(model)
    assert torch.equal(run(), before)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_but_the_sketched_weights_are_exact(architecture):
    """Embeddings, norms and biases see exact gradients, through every layer and dropout mask."""
    model, ids = tiny_model(architecture).train(), token_ids()
    report = convert(model, dry_run=True, **ROUGH)
    sketched = {f"{name}.weight" for name in report.converted}

    def run():
        model.zero_grad()
        torch.manual_seed(11)
        model(input_ids=ids, labels=ids if architecture in ("gpt2", "llama") else ids[:, 0] % 2).loss.backward()
        return gradients(model)

    before = run()
    convert(model, **ROUGH)
    after = run()
    assert before.keys() == after.keys()
    for name in before.keys() - sketched:
        assert torch.allclose(after[name], before[name], rtol=1e-4, atol=1e-7), name
    many = [n for n in sketched if "classifier" not in n and "pooler" not in n]
    assert all(not torch.allclose(after[name], before[name], rtol=1e-2) for name in many)


def test_parameters_are_the_same_objects_frozen_and_tied_as_before():
    model = Mlp(features=16, hidden=16, outputs=16)
    model.second.weight = model.first.weight
    model.first.bias.requires_grad_(False)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for change in (lambda: convert(model), lambda: revert(model)):
        change()
        now = dict(model.named_parameters(remove_duplicate=False))
        assert now.keys() == parameters.keys()
        assert all(now[name] is parameters[name] for name in now)
        assert model.first.weight is model.second.weight
        assert not model.first.bias.requires_grad


def test_a_tied_module_is_converted_once_and_stays_tied():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": shared})
    report = convert(model)
    assert list(report.converted) == ["a"]
    assert model["a"] is model["b"] is shared
    assert type(shared) is RMMLinear


def test_tied_module_matches_by_its_first_name():
    shared = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="matches none"):
        convert(nn.ModuleDict({"a": shared, "b": shared}), target_modules=["b"])


def test_state_dict_is_unchanged():
    model = tiny_model("bert")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    convert(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    model.load_state_dict(before)


def test_an_optimizer_made_before_trains_on():
    model = Mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = torch.randn(40, 12)
    model(x).square().mean().backward()
    optimizer.step()
    convert(model, **ROUGH)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert len(optimizer.state) == 4


def test_hooks_stay_and_fire():
    model, calls = Mlp(), []
    model.register_forward_hook(lambda *_: calls.append("model"))
    model.first.register_forward_hook(lambda *_: calls.append("first"))
    for change in (lambda: convert(model), lambda: revert(model), lambda: None):
        model(torch.randn(2, 12))
        assert calls == ["first", "model"]
        calls.clear()
        change()


def test_revert_leaves_no_trace():
    model = tiny_model("gpt2")
    before = snapshot(model)
    convert(model)
    assert snapshot(model) != before
    assert revert(model) is model
    assert snapshot(model) == before


def test_reverted_gradients_are_exact():
    model, x = Mlp(), torch.randn(50, 12)
    model(x).square().mean().backward()
    exact = gradients(model)
    convert(model, **ROUGH)
    revert(model)
    model.zero_grad()
    model(x).square().mean().backward()
    assert all(torch.equal(gradients(model)[name], exact[name]) for name in exact)


def test_a_ratio_of_one_is_exact():
    model, x = Mlp(), torch.randn(50, 12)
    model(x).square().mean().backward()
    exact = gradients(model)
    convert(model, **EXACT)
    model.zero_grad()
    model(x).square().mean().backward()
    assert all(torch.equal(gradients(model)[name], exact[name]) for name in exact)


def test_revert_of_a_part_leaves_the_rest_working():
    """The dropout masks too: the rest still belongs to a step of the whole model."""
    model, x = Mlp(dropout=0.5), torch.randn(50, 12)
    torch.manual_seed(4)
    output = model(x)
    convert(model, **ROUGH)
    revert(nn.ModuleList([model.second]))
    assert (type(model.first), type(model.second)) == (RMMLinear, nn.Linear)
    torch.manual_seed(4)
    assert torch.equal(model(x), output)
    seeds = seeds_of(lambda: [model(x) for _ in range(3)])
    assert len(set(seeds)) == 3
    revert(model)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    "twin_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("architecture", ["roberta", "gpt2"])
def test_copies_are_independent(architecture, twin_of):
    model, ids = tiny_model(architecture).train(), token_ids()
    convert(model, **ROUGH)
    twin = twin_of(model)
    outputs, seeds = [], []
    for one in (model, twin):
        torch.manual_seed(6)
        seeds.append(seeds_of(lambda one=one: outputs.append(one(input_ids=ids).logits)))
    assert torch.equal(*outputs)
    assert seeds[0] == seeds[1]
    outputs[1].sum().backward()
    assert not gradients(model)
    revert(twin)
    assert "RMM" not in repr(twin)
    assert "RMM" in repr(model)
    assert not any(m._forward_pre_hooks for m in twin.modules())
    assert any(m._forward_pre_hooks for m in model.modules())


def test_torch_save_of_a_whole_converted_model():
    model, x = Mlp().eval(), torch.randn(5, 12)
    convert(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), model(x))


def test_a_converted_models_weights_load_into_an_exact_one(tmp_path):
    model = tiny_model("roberta").eval()
    convert(model)
    model.save_pretrained(tmp_path)
    exact = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(exact(token_ids()).logits, model(token_ids()).logits)
    assert "rmm" not in json.dumps(exact.config.to_dict())
