"""Plans are data: frozen, compared and copied without the model that they were made for."""

import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import rmm_linear
from rmm_linear.conversion.exact import converted_modules
from rmm_linear.planning import BlockPlan, PlannedBlock, load_plan, order, plan_blocks, plan_graph
from rmm_linear.planning.plans import apply


def stack():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("planned", [plan_blocks, plan_graph, lambda *args, memory: order(*args)])
def test_the_model_is_no_part_of_a_plan(planned, tmp_path):
    model = stack()
    plan = planned(model, torch.ones(1000, 64), memory=0.8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.memory = 1
    plan.save(tmp_path / "plan.json")
    for other in (
        copy.copy(plan),
        copy.deepcopy(plan),
        pickle.loads(pickle.dumps(plan)),
        load_plan(tmp_path / "plan.json"),
    ):
        assert other == plan
        assert repr(other) == repr(plan)
        assert model not in vars(other).values()
        with pytest.raises(ValueError, match=r"loaded needs a model\. Use plan\.apply\(model\)"):
            other.apply()
    assert set(plan.to_dict()) <= {"format", *(field.name for field in dataclasses.fields(plan))}
    plan.apply()
    plan.revert()


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
    with pytest.raises(TypeError, match="got str"):
        apply("plan", models[0])


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
