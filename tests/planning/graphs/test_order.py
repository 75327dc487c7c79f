"""Other orders of a graph's nodes: legal, simulated, and the same gradients.

That a plan with another order changes no bit is in contracts/test_replay.py.
"""

import pytest
import torch
from planning_graph_helpers import gradients, network, same
from replay_cases import made
from replay_parts import (
    ROWS,
    WIDTH,
    Between,
    Branching,
    ByData,
    Positional,
    Queueing,
    Read,
    Renorming,
    Switching,
)
from torch import nn

from rmm_linear.planning import order, plan_graph, simulate
from rmm_linear.planning.graphs.capture import capture
from rmm_linear.planning.graphs.order import estimate
from rmm_linear.planning.graphs.pieces import run_in_pieces, simulate_graph
from rmm_linear.planning.graphs.record import graph_costs
from rmm_linear.planning.step.step import run_step

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning:torch"), pytest.mark.usefixtures("no_graphs_left")]


class Wasteful(nn.Module):
    """Makes large tensors long before they are read, each by itself."""

    def __init__(self, branches=6):
        super().__init__()
        self.first, self.second = nn.Linear(8, 256), nn.Linear(256, 8)
        self.branches = branches

    def forward(self, x):
        wide = [(x + number).repeat(1, 32) for number in range(self.branches)]  # not saved by what follows
        return sum(each.sum(1) for each in wide) + self.second(self.first(x)).sum(1)


def test_what_is_read_soon_after_it_is_made_needs_less_memory():
    model, x = Wasteful(), torch.randn(500, 8)
    expected = model(x)
    plan = order(model, x)
    assert plan.plain <= simulate(model, x).bytes  # the list holds its tensors until forward ends, a graph does not
    assert plan.predicted == simulate(plan, x).bytes < 0.6 * plan.plain
    assert sorted(plan.order) == list(range(len(plan.part)))
    assert torch.equal(plan.apply()(x), expected)


def test_another_order_of_a_planned_model_changes_no_bit_and_needs_no_more():
    model, example = network("cnn", blocks=2)
    expected = gradients(model, lambda: run_step(model, example), restore=True)
    for plan in (None, plan_graph(model, example, memory=0.7)):
        found = order(model, example, plan)
        assert found.predicted <= (found.plain if plan is None else plan.predicted)
        trained = found.apply()
        assert same(gradients(model, lambda trained=trained: run_step(trained, example), restore=True), expected)


@pytest.mark.parametrize("part", [Branching, Between, ByData, Queueing, Renorming, Positional, Switching, Read])
def test_no_order_that_is_legal_changes_a_bit(part):
    model, x = nn.Sequential(*made(part, "graph")), torch.randn(ROWS // 10, WIDTH)
    graph, inputs = capture(model, x)
    costs = graph_costs(graph, inputs)
    needed, draw = costs.before(), torch.Generator().manual_seed(1)
    expected = gradients(model, lambda: graph(*inputs)[0].square().sum().backward(), restore=True)
    for _ in range(5):
        left, drawn = set(range(costs.count)), []
        while left:
            ready = sorted(place for place in left if not needed[place] & left)
            drawn.append(ready[int(torch.randint(len(ready), (), generator=draw))])
            left.remove(drawn[-1])
        run = run_in_pieces(costs, [0] * costs.count, set(), drawn)
        found = gradients(model, lambda run=run: run(*inputs)[0].square().sum().backward(), restore=True)
        assert same(found, expected), drawn


def test_a_plain_graph_is_estimated_as_it_is_simulated():
    model, example = network("unet")
    graph, inputs = capture(model, example)
    costs = graph_costs(graph, inputs)
    # the gradient of a concatenation, half of which is counted, is the largest of the U-Net's tensors
    assert estimate(costs, range(costs.count))[0] == pytest.approx(simulate_graph(costs, graph).bytes, rel=0.1)


def test_a_plan_of_another_graph_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    plan = plan_graph(model, torch.ones(5, 4), memory=1.0)
    with pytest.raises(ValueError, match="another graph"):
        order(model, torch.ones(6, 4), plan)
