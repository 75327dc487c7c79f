"""Plans are data: frozen, compared and copied without the model that they were made for."""

import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest
import torch
from planning_graph_helpers import gradients
from tile_helpers import WIDTH, Stack, step
from torch import nn

import rmm_linear
from rmm_linear import planning
from rmm_linear.conversion.exact import converted_modules
from rmm_linear.planning import (
    BlockPlan,
    PlannedBlock,
    apply,
    load_plan,
    measure,
    order,
    plan_blocks,
    plan_graph,
    simulate,
)
from rmm_linear.planning.graphs.capture import capture
from rmm_linear.planning.step.step import run_step

pytestmark = pytest.mark.usefixtures("no_graphs_left")

NAMES = """Applied BPTTPlan Backend BlockCost BlockPlan CaptureError ChainPlan Costs GraphPlan NodeCost PlannedBlock
PlannedPiece StepBytes StoreError SweepReport apply backend bptt chain_sizes checkpoint_chain load_plan measure
minimum_peak open_store order plan_blocks plan_bptt plan_graph plot_memory simulate step_bytes sweep workspace"""


def test_names_of_version_0_1_0_stay():
    assert set(NAMES.split()) <= set(planning.__all__)


def stack():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


PLANNERS = {"blocks": plan_blocks, "graph": plan_graph, "order": lambda *given, memory: order(*given)}


@pytest.mark.parametrize("planned", PLANNERS.values(), ids=PLANNERS)
def test_a_plan_is_data_and_the_model_is_no_part_of_it(planned, tmp_path):
    model, x = stack(), torch.ones(1000, 64)
    plan = planned(model, x, memory=0.8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.memory = 1
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    for other in (copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan)), loaded):
        assert other == plan
        assert repr(other) == repr(plan)
        assert model not in vars(other).values()
        with pytest.raises(ValueError, match=r"loaded needs a model\. Use plan\.apply\(model\)"):
            other.apply()
    expected = gradients(model, lambda: run_step(model, x))
    trained = loaded.apply(model)
    found = gradients(model, lambda: run_step(trained, x))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert simulate(trained if planned is plan_blocks else loaded, x).bytes == plan.predicted
    if planned is plan_blocks:
        with pytest.raises(ValueError, match="applied already"):
            loaded.apply(model)
        with pytest.raises(ValueError, match="another plan"):
            plan.apply(model)
    else:
        with pytest.raises(ValueError, match="another graph"):
            plan.run(*capture(model, x[:5]))
    loaded.revert()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_is_reverted_by_its_own_plan(clone):
    model = stack()
    plan = BlockPlan([PlannedBlock("0", "recompute"), PlannedBlock("1", "keep")])
    plan.apply(model)
    for revert in (lambda other: other.rmm_plan.revert(), rmm_linear.revert):
        other = clone(model)
        assert other.rmm_plan == plan
        assert other.rmm_plan.is_applied
        revert(other)
        assert "forward" not in vars(other[0])
        assert not hasattr(other, "rmm_plan")
        assert plan.is_applied
        assert "forward" in vars(model[0])


def test_what_others_put_around_a_block_stays_when_its_plan_is_reverted(tmp_path):
    model, x, calls, runs = Stack(1), torch.randn(1, 512, WIDTH), [], []
    block, mlp = model.blocks[0], model.blocks[0].mlp
    block.register_forward_hook(lambda *_: runs.append("block"))
    mlp.up.register_forward_hook(lambda *_: runs.append("up"))
    expected = step(model, x)
    BlockPlan([PlannedBlock("blocks.0", "recompute + offload + tile", rows=64)], folder=str(tmp_path)).apply(model)
    for module, name in ((block, "Block"), (mlp, "Gated")):
        inner = module.forward
        module.forward = lambda *args, name=name, inner=inner: calls.append(name) or inner(*args)
    runs.clear()
    step(model, x)
    assert calls == ["Block", "Gated", "Gated"]
    assert runs.count("up") > 8
    rmm_linear.revert(model)
    calls.clear()
    runs.clear()
    assert all(map(torch.equal, step(model, x), expected))
    assert calls == ["Block", "Gated"]
    assert runs == ["up", "block"]
    again = BlockPlan([PlannedBlock("blocks.0", "recompute")])
    again.apply(model)
    calls.clear()
    assert all(map(torch.equal, step(model, x), expected))
    assert calls == ["Block", "Gated", "Block", "Gated"]
    again.revert()
    assert calls == ["Block", "Gated", "Block", "Gated"]


def test_one_plan_is_applied_to_several_models_by_handles():
    models = [stack(), stack()]
    plan = BlockPlan([PlannedBlock("0", "recompute")])
    handles = [apply(plan, model) for model in models]
    with handles[0] as planned:
        assert planned is models[0]
        assert "forward" in vars(planned[0])
    assert "forward" not in vars(models[0][0])
    assert "forward" in vars(models[1][0])
    handles[1].revert()
    handles[1].revert()
    assert "forward" not in vars(models[1][0])


X = torch.ones(100, 64)


@pytest.mark.parametrize(
    "call",
    [
        lambda: plan_blocks({}, X, "least"),
        lambda: plan_graph({}, X, "least"),
        lambda: simulate({}, X),
        lambda: measure({}, X),
        lambda: apply(BlockPlan([]), {}),
        lambda: apply(plan_graph(stack(), X, "least"), {}),
    ],
    ids=["plan_blocks", "plan_graph", "simulate", "measure", "apply blocks", "apply graph"],
)
def test_a_model_that_is_none_is_named(call):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got dict"):
        call()


def test_a_plan_that_is_none_is_named():
    with pytest.raises(TypeError, match="got str"):
        apply("plan", stack())


_SCRIPT = """
import sys
import torch
from torch import nn
from rmm_linear.planning import load_plan

assert not any(name.startswith("rmm_linear.conversion") for name in sys.modules)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)))
plan = load_plan(sys.argv[1])
plan.apply(model)
print(len(plan.conversion.converted) + len(plan.conversion.packed))
plan.revert()
"""


def test_a_plan_with_conversions_needs_planning_alone(tmp_path):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)))
    report = rmm_linear.fit(model, torch.randn(512, 64), 0.6, allow=("keep", "sketch", "pack"), max_noise=1e9)
    report.plan.save(tmp_path / "plan.json")
    count = len(converted_modules(model))
    assert count
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path / "plan.json")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(found.stdout) == count
