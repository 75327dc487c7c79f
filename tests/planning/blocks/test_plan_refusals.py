"""Plans in a training: changed models, retained graphs, evaluation, files; and what is refused."""

import dataclasses

import pytest
import torch
from planning_graph_helpers import gradients
from planning_hazards import WIDTH, Branches, Hazard, Read, Shared, made
from torch import nn
from torch.utils.checkpoint import checkpoint

import rmm_linear
from rmm_linear.planning import CaptureError, backend, load_plan, order, plan_blocks, plan_graph, simulate, workspace
from rmm_linear.planning.step.step import run_step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()


def convolutions():
    torch.manual_seed(0)
    layers = [(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.ReLU(inplace=True)) for i in range(6)]
    blocks = [nn.Sequential(*layers[i], *layers[i + 1]) for i in (0, 2, 4)]
    return nn.Sequential(*blocks), torch.randn(4, 3, 16, 16)


def test_evaluation_and_other_shapes_need_no_plan_of_their_own():
    model, x = convolutions()
    made = backend(memory=simulate(model, x).bytes)
    trained = torch.compile(model, backend=made, dynamic=False)
    with torch.no_grad():
        assert torch.equal(trained(x.repeat(8, 1, 1, 1)), model(x.repeat(8, 1, 1, 1)))
    assert made.plans == {}
    run_step(trained, x)
    assert len(made.plans) == 1
    larger = torch.cat([x, x])
    expected = gradients(model, lambda: run_step(model, larger))
    for plan in (plan_graph(model, x, memory="least"), order(model, x)):
        trained = plan.apply()
        found = gradients(model, lambda trained=trained: run_step(trained, larger))
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_plans_are_checked_when_they_are_read(tmp_path):
    model, x = made(Read)
    plan = order(model, x, plan_graph(model, x, memory="least"))
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == plan
    expected = gradients(model, lambda: run_step(model, x))
    trained = loaded.apply(model)
    found = gradients(model, lambda: run_step(trained, x))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    dataclasses.replace(loaded, order=[0, 1, 2]).save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="order must have each of the"):
        load_plan(tmp_path / "plan.json")


class Checkpointed(Hazard):
    """Has activation checkpointing of its own."""

    def forward(self, x):
        return checkpoint(self.stack, x, use_reentrant=False)


def test_what_cannot_be_planned_is_refused_with_the_remedy():
    model, x = made(Checkpointed)
    with pytest.raises(CaptureError, match=r"has its own\. Turn it off"):
        plan_graph(model, x, memory=0.5)
    model, x = made(Branches)
    rmm_linear.convert(model, ratio=0.5, min_rows=1)
    with pytest.raises(CaptureError, match="draws its sketches in another order"):
        plan_graph(model, x, memory=0.5)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="draws its sketches in another order"):
        torch.compile(model, backend=backend(memory=0.5), dynamic=False)(x)
    model, x = made(Read)
    with pytest.raises(CaptureError, match=r"got a function\. Pass the batch"):
        plan_graph(model, lambda: model(x), memory=0.5)
    with pytest.raises(ValueError, match="got a compiled model"):
        simulate(order(model, x).apply(), x)
    with pytest.raises(ValueError, match="none of its modules is called"):
        plan_blocks(nn.Linear(WIDTH, 2), x, memory=0.5)


def test_the_batch_and_the_modes_of_parts_stay_as_they_are():
    class Doubling(Hazard):
        def forward(self, x):
            return self.stack(x.mul_(2))

    model, x = made(Doubling)
    model.norm.eval()
    before = x.clone()
    workspace(model, x)
    plan_blocks(nn.Sequential(model, nn.Sequential(nn.Linear(WIDTH, 2), nn.Tanh())), x, memory=1.0)
    assert torch.equal(x, before)
    assert not model.norm.training


def test_parts_in_evaluation_mode_are_planned_as_such():
    model, x = made(Shared)
    model.norm.eval()
    plan = plan_graph(model, x, memory="least")
    trained = plan.apply()
    expected = gradients(model, lambda: run_step(model, x))
    found = gradients(model, lambda: run_step(trained, x))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert simulate(plan, x).bytes == plan.predicted  # of the same graph
