"""ConversionReport: a line to grep, a table to read, a dictionary to save."""

import json

import pytest
import torch
from helpers import Mlp, tiny_model, token_ids
from torch import nn

from rmm_linear import convert
from rmm_linear.config import OPERATIONS
from rmm_linear.conversion.report import RECOMPUTED
from rmm_linear.memory import explain

SKETCH = {"kind": "rows", "ratio": 0.25, "min_rows": 9}


@pytest.fixture
def report():
    return convert(tiny_model("roberta"), exclude_modules=["classifier.dense"], **SKETCH)


def test_first_line_is_greppable(report):
    line = str(report).splitlines()[0]
    assert line == report.summary()
    assert "frozen=" not in line
    assert "dry_run" not in line
    for part in (
        "rmm_linear: converted=13 ",
        " dropout=",
        " skipped=1 ",
    ):
        assert part in line


def test_converted_layers_are_in_the_models_order_and_know_their_sizes_and_class(report):
    names = [n for n, m in tiny_model("roberta").named_modules() if type(m) is nn.Linear and n != "classifier.dense"]
    assert list(report.converted) == names
    layer = report.converted["roberta.encoder.layer.0.intermediate.dense"]
    assert (layer.name, layer.type) == ("roberta.encoder.layer.0.intermediate.dense", "Linear")
    assert (layer.in_features, layer.out_features, layer.config.kind) == (16, 32, "rows")


def cells_of(text):
    """Name to the other cells, for every row of a report."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {cells[0]: cells[1:] for cells in lines}


def test_siblings_share_a_row_and_what_most_save_is_said_once(report):
    """In short; a layer by itself keeps its name, and the reason of skipped ones follows. Whole, each has its own."""
    rows = cells_of(str(report))
    assert rows["roberta.encoder.layer.{0-1}.attention.self.query"] == ["2", "linear"]
    assert rows["classifier.out_proj"] == ["1", "linear"]
    assert "\nclassifier.dense: skipped: in exclude_modules\n" in str(report)
    assert str(report).splitlines()[1].startswith("linear: rows, ratio 0.25, at least 9 rows; norm: ")
    whole = cells_of(report.table())
    assert whole["roberta.encoder.layer.1.attention.self.query"][:2] == ["linear", "16 → 16"]
    assert len([name for name in whole if name in report.converted]) == 13


def test_layers_that_differ_do_not_share_a_row():
    text = str(convert(tiny_model("roberta"), overrides={"layer.1.attention.self.query": {"ratio": 0.5}}, **SKETCH))
    assert "roberta.encoder.layer.0.attention.self.query" in text
    assert "roberta.encoder.layer.1.attention.self.query" in text
    assert "roberta.encoder.layer.{0-1}.attention.self.key" in text


def test_frozen_layers_are_said_to_keep_nothing():
    """Each says what holds when it is converted; the others of its row are named by themselves."""
    model = tiny_model("roberta")
    for part in ("attention.self.key", "output.dense"):
        model.get_submodule(f"roberta.encoder.layer.0.{part}").weight.requires_grad_(False)
    report = convert(model, **SKETCH)
    assert report.frozen == ["roberta.encoder.layer.0.attention.self.key", "roberta.encoder.layer.0.output.dense"]
    assert report.summary().startswith("rmm_linear: converted=12 frozen=2 ")
    assert "\n2 modules are frozen and save nothing: roberta.encoder.layer.0.attention.self.key," in str(report)
    assert "roberta.encoder.layer.1.output.dense" in cells_of(str(report))
    assert cells_of(report.table())["roberta.encoder.layer.0.output.dense"][-1] == "frozen"
    converted = report.to_dict()["converted"]
    assert [converted[f"roberta.encoder.layer.{i}.attention.self.key"]["frozen"] for i in range(2)] == [True, False]


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_conversion_that_keeps_nothing_less_warns(caplog, dry_run):
    """Every weight is frozen: nothing is sketched, and one would not see why. One that trains is enough."""
    model = Mlp().requires_grad_(False)
    model.first.bias.requires_grad_(True)
    assert convert(model, dry_run=dry_run, operations="linear", **SKETCH).frozen == ["first", "second"]
    assert ["No weight of the 2 layers" in message for message in caplog.messages] == [True]
    caplog.clear()
    model = Mlp()
    model.first.weight.requires_grad_(False)
    assert convert(model, dry_run=dry_run, operations="linear", **SKETCH).frozen == ["first"]
    assert not caplog.messages


def test_dictionary_is_plain_json(report):
    values = json.loads(json.dumps(report.to_dict()))
    assert values == report.to_dict()
    assert values["config"]["kind"] == "rows"
    assert values["skipped"] == {"classifier.dense": "in exclude_modules"}
    layer = values["converted"]["classifier.out_proj"]
    assert (layer["type"], layer["in_features"], layer["config"]["ratio"]) == ("Linear", 16, 0.25)
    assert values["dry_run"] is False


def test_both_tables_of_a_report_say_which_layers_stay_exact():
    batch = {"input_ids": token_ids(8, 30), "labels": torch.zeros(8, dtype=torch.long)}
    report = convert(tiny_model("roberta"), example=batch)
    reason = "the layer sees 8 rows and stays exact"
    assert report.linear_exact == {"classifier.dense": reason, "classifier.out_proj": reason}
    assert {report.memory.layers[name].reason for name in report.linear_exact} == {reason}
    rows = cells_of(str(report))
    assert f"\nclassifier.dense, classifier.out_proj: {reason}\n" in str(report)
    assert rows["roberta.encoder.layer.{0-1}.output.dense"] == ["2", "linear"]
    assert "exact=2 " in report.summary()


def test_fused_without_kernels_is_said_to_have_no_effect(monkeypatch):
    hint = "fused=True has no effect on cpu (float32)"
    batch = {"input_ids": token_ids(8, 30)}
    report = convert(tiny_model("roberta"), fused=True, example=batch)
    assert str(report).count(hint) == 1
    assert report.to_dict()["unfused"].startswith(hint)
    assert str(explain(tiny_model("roberta"), batch, fused=True)).count(hint) == 1
    for fields in ({}, {"fused": True, "operations": ["linear", "attention"]}):
        assert convert(tiny_model("roberta"), dry_run=True, **fields).unfused is None
        assert hint not in str(explain(tiny_model("roberta"), batch, **fields))
    monkeypatch.setattr("rmm_linear.conversion.packed.backend_of", lambda device, dtype: "triton")
    report = convert(tiny_model("roberta"), dry_run=True, fused=True, operations="activation")
    assert report.packed
    assert report.unfused is None


def test_checkpointing_that_is_turned_on_after_the_conversion_is_in_the_report():
    model = tiny_model("roberta")
    report = convert(model)
    model.gradient_checkpointing_enable()
    assert not report.linear_exact
    now = report.in_training(model)
    assert len(now.linear_exact) == 12
    assert {now.linear_exact[name] for name in now.linear_exact} == {RECOMPUTED}
    assert set(now.linear_exact) < set(now.checkpointed) < {*report.converted, *report.packed}


def test_the_report_says_how_the_whole_model_is_measured_or_what_it_saves():
    model = Mlp()
    assert str(convert(model, dry_run=True)).endswith("saves, pass a batch: convert(model, example=batch).")
    with_example = str(convert(model, example=torch.ones(512, 12)))
    assert "\n\nsaved for backward: " in with_example
    assert "example=batch" not in with_example


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, 64, 64))

    def forward(self, x):
        return torch.stack([torch.addmm(x.new_zeros(64), x, one) for one in self.weights]).cos().sum(0)


class Mixer(nn.Module):
    """Weights of its own, and what is no weight of a product: a token, and a table of embeddings."""

    def __init__(self):
        super().__init__()
        self.weight, self.token = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.zeros(1, 64))
        self.embed = nn.Embedding(4, 64)

    def forward(self, x):
        return torch.addmm(self.token + self.embed.weight[0], x, self.weight)


class KernelNorm(nn.Module):
    """A norm whose kernel does not run here, so that it cannot be compared with one that is known."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x):
        raise RuntimeError("no device")


def test_a_norm_that_cannot_run_here_is_named():
    report = convert(nn.Sequential(nn.Linear(64, 64), KernelNorm(), nn.LayerNorm(64)))
    assert report.uncompressed == {"1": "KernelNorm"}
    assert "\n1: stays: KernelNorm" in str(report)
    assert list(report.packed) == ["2"]


class OwnBatchNorm(nn.BatchNorm1d):
    """Code of its own."""

    def forward(self, x):
        return super().forward(x)


def test_what_stays_has_a_row_for_each_kind_and_its_bytes():
    conv = nn.Sequential(nn.Unflatten(1, (1, 64)), nn.Conv1d(1, 1, 3, padding=1), OwnBatchNorm(1), nn.Flatten())
    model = nn.Sequential(nn.Linear(64, 64), Experts(), Mixer(), conv)
    kinds = {"1": "experts", "2": "Mixer", "3.1": "convolutions", "3.2": "norms over other dimensions"}
    less = {"operations": [one for one in OPERATIONS if one != "convolution"], "min_rows": 1}
    assert convert(model, dry_run=True, **less).uncompressed == kinds
    report = convert(model, **less, ratio=0.5, example=torch.randn(512, 64))
    rows = dict(line.split(": ", 1) for line in report.modules().splitlines() if ": stays: " in line)
    assert list(rows) == list(kinds)
    left = {one.modules: one.bytes for one in report.memory.remaining}
    assert left["2"] == 512 * 64 * 4  # its input
    assert left["1"] > 2 * left["2"]  # its outputs, and more
    shares = {kind: count / report.memory.before for kind, count in report.memory.kinds.items()}
    for name, kind in kinds.items():
        assert rows[name] == f"stays: {kind}, {left[name]:,} bytes"
        assert (f" {shares[kind]:.0%} {kind}" in report.memory.line()) == (shares[kind] >= 0.02)
    assert sum(report.memory.kinds.values()) == report.memory.after - report.memory.stand_ins


@pytest.mark.parametrize("mode", [True, False])
def test_a_model_in_eval_mode_is_named_as_no_step_can_be_trained(mode):
    report = convert(tiny_model("roberta").train(mode), **SKETCH)
    assert ("hint: the model is in eval mode: call model.train()" in str(report)) is not mode
    assert report.to_dict()["is_eval"] is not mode


def test_layers_too_narrow_for_directions_are_named():
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64), nn.Linear(64, 64))
    whole = cells_of(convert(model, quality="careful").table())
    few = "its rows, 4 bits, too narrow for directions"
    assert [whole[name][2] for name in ("0", "2", "3")] == ["its rows, 4 bits"] * 2 + [few]
