"""Files that an earlier version has written are read as they were meant.

Those in data/ were written by 0.1.0 and 0.2.0, and stand for the files that users have. They must never be written
again: a test that writes what it reads would pass whatever the format becomes. What made them: `SETTINGS` saved by
themselves; two models of `Siblings` after five steps on batches of (2, 20, 8), one in the width that was chosen, one
with wta and norm estimators as well; and for 0.2.0 a `network` after 40 steps on batches of (4, 64, 256), and plans of
one, of which block 4 was made to be recomputed by hand.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rmm_linear import RMMConfig, RMMLinear, convert, read_sketch_state, sketch_state, sketch_tensors
from rmm_linear.integrations.pretrained import convert_as_saved
from rmm_linear.planning import load_plan

DATA = Path(__file__).parent / "data"
NAMES = ["query", "key", "out"]
SETTINGS = {
    "kind": "wta",
    "ratio": None,
    "memory": 0.2,
    "bits": 4,
    "block": None,
    "uniform_mix": 0.2,
    "norm_estimator": "position",
    "min_rows": 2,
    "mask_padding": False,
    "target_modules": NAMES,
    "exclude_modules": ["lm_head"],
    "overrides": {"out": {"kind": "rademacher", "ratio": 0.5, "bits": 8, "block": 16, "norm_estimator": "none"}},
}


class Siblings(nn.Module):
    """Two layers that read one tensor, and one that reads another."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.out = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.query(x) * self.key(x))


def train(model):
    """A step in which every layer has a gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.randn(2, 20, 8)).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    optimizer.step()
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_a_configuration_is_read():
    config = RMMConfig.load(DATA / "config.json")
    assert config == RMMConfig(**SETTINGS, operations="linear", norm_bits=2)
    for name, value in SETTINGS.items():
        found = getattr(config, name)
        assert (list(found) if isinstance(value, list) else found) == value, name
    out = config.for_module("out")
    assert (out.kind, out.ratio, out.memory, out.bits, out.block) == ("rademacher", 0.5, None, 8, 16)


def test_a_configuration_of_the_old_defaults_is_read():
    """A tenth of the bytes, and widths that were chosen."""
    values = {"memory": 0.1, "bits": "auto", "activation_bits": "auto", "overrides": {"out": {"memory": 0.2}}}
    config = RMMConfig.from_dict({"rmm_linear_version": "0.1.0", "operations": ["linear", "activation"], **values})
    assert (config.memory, config.bits, config.activation_bits) == (0.1, "auto", 4)
    assert RMMConfig.from_dict(config.to_dict()) == config


def test_a_state_with_chosen_widths_is_read():
    """The layers and their groups are; a width follows from the configuration now."""
    model = Siblings()
    convert(model, min_rows=1, target_modules=NAMES)
    read_sketch_state(model, DATA / "auto_bits.json")
    state = sketch_state(model)
    assert (state["layers"], state["groups"]) == (NAMES, [["query", "key"]])
    train(model)


def test_a_conversion_with_norm_estimators_is_read():
    model = Siblings()
    report = convert_as_saved(model, DATA / "conversion")
    assert list(report.converted) == NAMES
    assert report.config == RMMConfig(
        kind="wta",
        memory=0.3,
        min_rows=1,
        norm_estimator="position",
        target_modules=NAMES,
        operations="linear",
        norm_bits=2,
    )
    assert sketch_state(model)["groups"] == [["query", "key"]]
    (file,) = (DATA / "conversion").glob("*.safetensors")
    written, read = load_file(file), sketch_tensors(model)
    assert read.keys() == written.keys() == {f"{name}:{part}" for name in NAMES for part in ("position", "unit")}
    assert all(torch.equal(read[name], tensor) for name, tensor in written.items())
    assert float(written["query:unit"][0]) == pytest.approx(3.9090, abs=1e-4)
    train(model)
    learned = sketch_tensors(model)
    assert learned.keys() == written.keys()
    assert not any(torch.equal(learned[name], tensor) for name, tensor in written.items())  # it goes on from there


def network():
    """Two blocks that are wide enough for fixed directions."""
    block = [nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)]
    return nn.Sequential(*block, nn.LayerNorm(256), nn.Linear(256, 2))


def trained(model):
    """The gradient of a step, finite for every parameter."""
    model(torch.randn(4, 64, 256)).square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_conversion_with_directions_and_widened_codes_is_read():
    model = network()
    report = convert_as_saved(model, DATA / "0.2.0")
    assert report.config == RMMConfig(bits=4, directions=2, norm_bits=4, overrides={"5": {"bits": 2, "directions": 0}})
    assert {name: bits for name, (bits, _) in report.widened.items()} == {"2": 8, "3": 8, "5": 8}
    (file,) = (DATA / "0.2.0").glob("*.safetensors")
    written, read = load_file(file), sketch_tensors(model)
    assert read.keys() == written.keys()
    assert len(read) == 2
    assert all(torch.equal(read[name], tensor) for name, tensor in written.items())
    trained(model)


def test_plans_are_read():
    plan, model = load_plan(DATA / "plans" / "block_plan.json"), network()
    choices = [(block.name, block.choice, block.setting) for block in plan.blocks]
    assert choices == [
        *(("0", "keep", ""), ("1", "convert", "narrow"), ("2", "keep", "")),
        *(("3", "convert", "narrow"), ("4", "recompute", ""), ("5", "keep", "")),
    ]
    assert (plan.memory, plan.predicted, plan.plain) == (1094953, 1084448, 1581072)
    plan.apply(model)
    assert [name for name, one in model.named_modules() if isinstance(one, RMMLinear)] == ["1", "3"]
    trained(model)
    plan.revert()
    graph = load_plan(DATA / "plans" / "graph_plan.json")
    assert (graph.recomputed, graph.predicted, [piece.nodes for piece in graph.pieces]) == ((1,), 1318928, [1, 2, 3])
