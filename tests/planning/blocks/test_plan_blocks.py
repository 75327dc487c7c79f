"""Planned blocks: within the budget, predicted to the byte, and the same gradients and buffers to the bit."""

import copy
import gc
import pickle

import pytest
import torch
from planning_graph_helpers import NETWORKS, gradients, network
from torch import nn

import rmm_linear
from rmm_linear import RMMConfig
from rmm_linear.memory import peak
from rmm_linear.planning import BlockPlan, PlannedBlock, load_plan, plan_blocks, simulate
from rmm_linear.planning.step.step import run_step

SHARES = {"mlp": 0.6, "roberta": 0.6, "llama": 0.6, "cnn": 0.6, "unet": 0.75}


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in ("roberta", "unet"))) for name in NETWORKS]
)
def test_a_planned_step_fits_and_changes_no_bit(name):
    model, example = network(name)
    before = copy.deepcopy(model.state_dict())
    expected = gradients(model, lambda: run_step(model, example))
    plan = plan_blocks(model, example, memory=SHARES[name])
    assert plan.predicted <= plan.memory == int(SHARES[name] * plan.plain)
    assert any(block.choice != "keep" for block in plan.blocks)

    assert plan.apply() is model
    model.load_state_dict(before)
    assert same(gradients(model, lambda: run_step(model, example)), expected)
    gc.collect()
    with peak("cpu") as measured:
        run_step(model, example)
    assert measured.bytes == plan.predicted

    plan.revert()
    model.load_state_dict(before)
    assert same(gradients(model, lambda: run_step(model, example)), expected)
    assert simulate(model, example).bytes == plan.plain


@pytest.mark.diagonal
@pytest.mark.parametrize("choice", ["recompute", "selective", "nested"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_choice_changes_no_bit(name, choice):
    model, example = network(name)
    before = copy.deepcopy(model.state_dict())
    expected = gradients(model, lambda: run_step(model, example))
    costs = rmm_linear.planning.measure(model, example)
    rows = [
        PlannedBlock(block.name, choice, inner=rmm_linear.planning.blocks.find.find_inner(model, block.name))
        for block in costs.blocks
    ]
    plan = BlockPlan(rows)
    model.load_state_dict(before)
    plan.apply(model)
    assert same(gradients(model, lambda: run_step(model, example)), expected)
    assert simulate(plan, example).bytes < costs.peak.bytes


def test_a_plan_is_data(tmp_path):
    model, example = network("mlp")
    plan = plan_blocks(model, example, memory=0.6)
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == plan
    with pytest.raises(ValueError, match="needs a model"):
        again.apply()
    planned = again.apply(model)
    assert simulate(planned, example).bytes == plan.predicted
    with pytest.raises(ValueError, match="applied already"):
        again.apply(model)
    with pytest.raises(ValueError, match="another plan"):
        plan.apply(model)
    rows = str(plan).splitlines()
    assert len(rows) == 3 + len(plan.blocks)
    assert "recompute" in rows[0]


def test_planned_models_are_copied_and_pickled():
    model, example = network("mlp")
    plan = plan_blocks(model, example, memory=0.6)
    plan.apply()
    expected = gradients(model, lambda: run_step(model, example))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(gradients(other, lambda other=other: run_step(other, example)), expected)
        assert simulate(other, example).bytes == plan.predicted


def test_a_plain_step_that_fits_is_kept():
    model, example = network("mlp")
    plan = plan_blocks(model, example, memory="1GB")
    assert {block.choice for block in plan.blocks} == {"keep"}
    assert (plan.predicted, plan.flops) == (plan.plain, 1.0)


def test_what_cannot_fit_says_the_least_and_what_binds():
    model, example = network("mlp")
    with pytest.raises(ValueError, match=r"the least is \d+ bytes .* of \d") as raised:
        plan_blocks(model, example, memory=0.05)
    least = int(str(raised.value).split("the least is ")[1].split()[0])
    plan = plan_blocks(model, example, memory=least)
    assert plan.predicted <= least
    with pytest.raises(ValueError, match="share"):
        plan_blocks(model, example, memory=1.5)
    with pytest.raises(ValueError, match="size"):
        plan_blocks(model, example, memory="much")


class Overwriting(nn.Module):
    """Changes what it is given."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x.mul_(2))


def test_a_block_that_overwrites_its_input_is_kept():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), *(Overwriting() for _ in range(4))), torch.randn(500, 8)
    costs = rmm_linear.planning.measure(model, x)
    assert [block.writes_input for block in costs.blocks] == [False, True, True, True, True]
    with pytest.raises(ValueError, match="cannot be met"):
        plan_blocks(model, x, memory=0.3)


def test_a_converted_model_keeps_its_sketches():
    model, example = network("roberta")
    example = {name: torch.cat([value] * 8) for name, value in example.items()}
    rmm_linear.convert(model, RMMConfig(checkpointed="packed", min_rows=8, bits=4))
    expected = gradients(model, lambda: run_step(model, example))
    plan = BlockPlan([PlannedBlock(f"roberta.encoder.layer.{place}", "recompute") for place in (0, 1)])
    plan.apply(model)
    assert same(gradients(model, lambda: run_step(model, example)), expected)
    plan.revert()
    made = plan_blocks(model, example, memory=0.9)
    assert made.predicted <= 0.9 * made.plain
    made.apply()
    assert same(gradients(model, lambda: run_step(model, example)), expected)


def test_a_block_that_fills_a_cache_is_refused_with_the_remedy():
    model, example = network("llama")
    model.config.use_cache = True
    with pytest.raises(ValueError, match=r"caches of keys and values do\. Set model\.config\.use_cache=False"):
        plan_blocks(model, example, memory=0.5)
