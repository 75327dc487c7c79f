"""Which layers convert takes and which it leaves alone, by name and by type, and what a mistake gets."""

import logging

import pytest
import torch
from cases import LINEAR, ROUGH
from helpers import ARCHITECTURES, Mlp, snapshot, tiny_model
from torch import nn
from torch.nn.utils import parametrizations

from rmm_linear import RMMConfig, RMMLinear, convert, revert


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
    report = convert(model, operations="linear")
    assert list(report.converted) == ["plain"]
    reason = "{} is a subclass, whose output is not known to be that of nn.Linear"
    assert report.skipped["attention.out_proj"] == reason.format("NonDynamicallyQuantizableLinear")
    assert report.skipped["lazy"] == reason.format("LazyLinear")
    assert report.skipped["bilinear"] == reason.format("Bilinear")
    assert report.skipped["parametrized"] == reason.format("ParametrizedLinear")
    assert set(report.skipped) == {"attention.out_proj", "lazy", "bilinear", "parametrized"}
    assert {n: type(m) for n, m in model.named_modules() if n != "plain"} == {
        n: t for n, t in types.items() if n != "plain"
    }


class QuantLinear(nn.Module):
    """As in GPTQ: the weight is packed in a buffer of another name."""

    def __init__(self):
        super().__init__()
        self.in_features, self.out_features = 4, 4
        self.register_buffer("qweight", torch.zeros(2, 4, dtype=torch.int32))


def test_a_subclass_that_keeps_the_forward_method_is_converted_without_weights():
    class Built(nn.Linear):
        def __init__(self, features):
            super().__init__(features, features)

    with torch.device("meta"):
        model = nn.Sequential(Built(4))
    assert list(convert(model).converted) == ["0"]
    model.to_empty(device="cpu")
    assert model.train()(torch.ones(80, 4)).grad_fn.name() == "SketchedLinearFunctionBackward"


def test_layers_that_are_not_plain_are_skipped_with_their_reason():
    model = nn.Sequential(nn.Linear(4, 4), QuantLinear(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[3].forward = lambda x: x
    skipped = convert(model).skipped
    assert skipped.pop("3").startswith("its forward method was replaced")
    assert skipped == {"1": "QuantLinear is a subclass, whose output is not known to be that of nn.Linear"}


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_output_head_is_skipped_and_can_be_named(architecture):
    model = tiny_model(architecture)
    report = convert(model, **LINEAR)
    assert report.skipped == {"lm_head": "the output head"}
    assert type(model.lm_head) is nn.Linear
    revert(model)
    assert list(convert(model, target_modules=["lm_head"]).converted) == ["lm_head"]


def test_every_linear_layer_of_the_architectures_is_in_the_report():
    for architecture in ARCHITECTURES:
        model = tiny_model(architecture)
        linears = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}
        report = convert(model, dry_run=True)
        assert set(report.converted) | set(report.skipped) | (set(report.packed) & linears) == linears
        assert len(report.converted) >= 8


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
        ({"target_modules": "query"}, ValueError, r"Did you mean \['query'\]\?"),
        ({"target_modules": "all_linear"}, ValueError, r"Did you mean 'all-linear'\?"),
        ({"exclude_modules": ".*"}, ValueError, "all 7 linear layers are skipped .*in exclude_modules"),
        (
            {"overrides": {"kuery": {"ratio": 0.5}}},
            ValueError,
            r"overrides\['kuery'\] must match a converted module.*query",
        ),
        (
            {"overrides": {"query": {"ratio": 0.5}}, "target_modules": ["out"]},
            ValueError,
            r"overrides\['query'\] must match a converted module",
        ),
        (
            {"overrides": {"query": {"ratio": 0.5}, "dense": {"ratio": 0.5, "norm_bits": 4}}},
            ValueError,
            r"overrides\['dense'\] changes norm_bits, .* 'norm', and matches modules of the operation linear alone",
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


def test_one_entry_without_match_is_logged(caplog):
    with caplog.at_level(logging.WARNING, "rmm_linear"):
        report = convert(Named(*NAMES), target_modules=["query", "valeu"])
        convert(Named(*NAMES), exclude_modules=["valeu"])
    assert len(report.converted) == 2
    assert "'valeu' matches no linear layer" in caplog.text
    assert "exclude_modules: 'valeu' matches no module" in caplog.text


@pytest.mark.parametrize(("entry", "is_said"), [("part.1", True), (["part.1"], False), (r"(.*\.)?part\..*", False)])
@pytest.mark.parametrize("operations", ["linear", "norm"])
def test_an_exclusion_without_match_is_logged_whatever_its_form(entry, is_said, operations, caplog):
    whole = nn.ModuleDict({"part": nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))})
    model = nn.ModuleDict({"whole": whole, "norm": nn.LayerNorm(8), "dense": nn.Linear(8, 8)})
    convert(model, operations=operations, exclude_modules=entry, min_rows=1)
    assert ("matches no module" in caplog.text) == is_said
    assert ("did you mean ['part.1']?" in caplog.text) == is_said


@pytest.mark.parametrize("model", [nn.Sequential(nn.ReLU()), nn.Module()])
def test_a_model_without_linears(model):
    with pytest.raises(ValueError, match="convert needs a model with modules inside"):
        convert(model, operations="linear")


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


def test_dry_run_changes_nothing_and_reports_the_same():
    model = tiny_model("roberta")
    before, state = snapshot(model), torch.get_rng_state()
    dry = convert(model, dry_run=True, **ROUGH)
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    wet = convert(model, **ROUGH)
    assert (dry.dry_run, wet.dry_run) == (True, False)
    assert dry.to_dict() | {"dry_run": False} == wet.to_dict()
