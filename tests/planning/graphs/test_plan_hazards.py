"""No plan and no legal order changes a bit of models in which order matters."""

import copy

import pytest
import torch
from planning_graph_helpers import gradients
from planning_hazards import HAZARDS, made

from rmm_linear.planning import order, plan_graph
from rmm_linear.planning.graphs.capture import capture
from rmm_linear.planning.graphs.pieces import run_in_pieces
from rmm_linear.planning.graphs.record import graph_costs
from rmm_linear.planning.step.step import run_step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("methods", [("cuts",), pytest.param(("chen", "kusumoto"), marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", HAZARDS)
def test_no_plan_changes_a_bit(kind, methods):
    model, x = made(kind)
    before = copy.deepcopy(model.state_dict())
    expected = gradients(model, lambda: run_step(model, x))
    plans = [plan_graph(model, x, memory="least", method=method) for method in methods]
    plans += [order(model, x), order(model, x, plans[0])]
    for plan in plans:
        model.load_state_dict(before)
        trained = plan.apply()
        found = gradients(model, lambda trained=trained: run_step(trained, x))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), plan.summary()


@pytest.mark.parametrize("kind", HAZARDS)
def test_no_order_that_is_legal_changes_a_bit(kind):
    model, x = made(kind)
    before = copy.deepcopy(model.state_dict())
    graph, inputs = capture(model, x)
    costs = graph_costs(graph, inputs)
    needed, draw = costs.before(), torch.Generator().manual_seed(1)
    expected = gradients(model, lambda: graph(*inputs)[0].square().sum().backward())
    for _ in range(5):
        left, drawn = set(range(costs.count)), []
        while left:
            ready = sorted(place for place in left if not needed[place] & left)
            drawn.append(ready[int(torch.randint(len(ready), (), generator=draw))])
            left.remove(drawn[-1])
        run = run_in_pieces(costs, [0] * costs.count, set(), drawn)
        model.load_state_dict(before)
        found = gradients(model, lambda run=run: run(*inputs)[0].square().sum().backward())
        assert all(torch.equal(found[name], expected[name]) for name in expected), drawn
