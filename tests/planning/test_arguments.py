"""What planning calls say to a wrong model or store."""

import pytest
import torch
from torch import nn

from rmm_linear import planning

X = torch.ones(100, 8)


def small_model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


PLANS = planning.plan_blocks(small_model(), X, "least"), planning.plan_graph(small_model(), X, "least")


@pytest.mark.parametrize(
    "call",
    [
        lambda: planning.plan_blocks({}, X, "least"),
        lambda: planning.plan_graph({}, X, "least"),
        lambda: planning.simulate({}, X),
        lambda: planning.measure({}, X),
        lambda: planning.apply(PLANS[0], {}),
        lambda: planning.apply(PLANS[1], {}),
    ],
    ids=["plan_blocks", "plan_graph", "simulate", "measure", "apply blocks", "apply graph"],
)
def test_a_model_that_is_none_is_named(call):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got dict"):
        call()


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("steps", [1, 20])
def test_a_file_is_no_store_whatever_runs(below, steps, tmp_path):
    path, ran = tmp_path / "file", []
    path.write_text("mine")
    store = path / "inside" if below else path
    with torch.no_grad(), pytest.raises(planning.StoreError, match="is a file"):
        planning.sweep(lambda i, u: ran.append(i) or u * 2, X, steps, slots=2, store=store)
    assert not ran
    assert path.read_text() == "mine"


def test_a_handle_undoes_a_plan():
    model = small_model()
    plan = planning.BlockPlan([planning.PlannedBlock(str(number), "recompute") for number in range(3)])
    with planning.apply(plan, model) as planned:
        assert planned is model
        assert all("forward" in vars(block) for block in model)
    assert not any("forward" in vars(block) for block in model)
