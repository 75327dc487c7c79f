"""What a report says of fused=True: which modules keep their own output, and why."""

import copy

import pytest
import torch
from gated_helpers import made
from helpers import tiny_model
from torch import nn
from transformers.activations import ACT2FN

from rmm_linear import convert


class Sequences(nn.Module):
    """A norm of sequences alone, so that the rows on which rounding is tried say nothing."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x):
        if x.dim() < 3:
            raise ValueError("x must have three dimensions")
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


def unfused(model, **fields):
    return convert(model, dry_run=True, fused=True, **{"operations": ["norm", "activation"], **fields}).unfused


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    """Kernels run in every dtype but float64."""
    monkeypatch.setattr(
        "rmm_linear.conversion.packed.backend_of", lambda device, dtype: "plain" if dtype == torch.float64 else "triton"
    )


def test_norms_and_composed_activations_are_off_under_autocast():
    blocks = [nn.ModuleDict({"norm": nn.LayerNorm(8), "act": copy.deepcopy(ACT2FN["gelu_new"])}) for _ in range(2)]
    model = nn.Module()
    model.layer, model.act, model.gelu = nn.ModuleList(blocks), nn.GELU(), copy.deepcopy(ACT2FN["gelu"])
    line = "fused=True has no effect on {} under autocast, which chooses a dtype for each function."
    assert unfused(model) == line.format("layer.{0-1}.norm, layer.{0-1}.act")
    assert unfused(tiny_model("roberta")).count("\n") == 0
    assert "layer.{0-1}.output.LayerNorm" in unfused(tiny_model("roberta"))


def test_modules_in_place_are_named():
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(inplace=True), nn.GELU())
    assert unfused(model) == "fused=True has no effect on 1: modules that work in place stay as they are."


def test_dropout_is_named_where_it_works_in_place_or_no_kernel_runs():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Dropout(0.1, inplace=True))
    report = convert(model, dry_run=True, fused=True, operations=["dropout"])
    assert report.unfused == "fused=True has no effect on 2: modules that work in place stay as they are."
    assert report.packed["1"].saved == "its seed, or without kernels 1 bit per element"
    model.double()
    assert unfused(model[:2], operations="dropout").startswith("fused=True has no effect on cpu (float64)")


def test_norms_that_round_in_an_unknown_way_are_named():
    assert unfused(nn.Sequential(nn.Linear(64, 64), Sequences())) == (
        "fused=True has no effect on 1: how they round is not known."
    )


def test_norms_over_channels_are_named():
    assert unfused(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())) == (
        "fused=True has no effect on 1: norms over channels have no such kernel."
    )


def test_modules_where_no_kernel_runs_are_named():
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8).double(), nn.GELU())
    named = unfused(model).splitlines()
    assert len(named) == 2
    assert named[1] == "fused=True has no effect on 1: on cpu (float64), Triton's kernels do not run."
    assert unfused(model.double()).startswith("fused=True has no effect on cpu (float64), where Triton's kernels do")


def test_gated_mlps_are_off_under_autocast_with_composed_activations():
    model = made("llama")
    assert unfused(model) is None
    model.mlp.act_fn = copy.deepcopy(ACT2FN["gelu_new"])
    assert unfused(model).startswith("fused=True has no effect on mlp under autocast")


def test_overrides_ask_for_some():
    model = nn.Sequential(nn.SiLU(inplace=True), nn.ELU(inplace=True), nn.Linear(8, 8))
    assert "on 1:" in unfused(model, overrides={"0": {"fused": False}})
    assert unfused(model, overrides={"0|1": {"fused": False}}) is None
