"""Other orders of a graph's nodes: legal, simulated, and the same gradients."""

import copy

import pytest
import torch
from planning_graph_helpers import gradients, network
from torch import nn

from rmm_linear.planning import order, plan_graph, simulate
from rmm_linear.planning.capture import capture
from rmm_linear.planning.graph_record import graph_costs
from rmm_linear.planning.order import estimate
from rmm_linear.planning.step import run_step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()


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


@pytest.mark.parametrize("name", ["mlp", "roberta", "cnn"])
def test_another_order_changes_nothing_but_the_order_of_sums(name):
    model, example = network(name)
    before = copy.deepcopy(model.state_dict())
    expected = gradients(model, lambda: run_step(model, example))
    for plan in (None, plan_graph(model, example, memory=0.7)):
        model.load_state_dict(before)
        found = order(model, example, plan)
        assert found.predicted <= (found.plain if plan is None else plan.predicted)
        trained = found.apply()
        got = gradients(model, lambda trained=trained: run_step(trained, example))
        assert got.keys() == expected.keys()
        for each, value in got.items():
            if each.startswith("buffer"):
                assert torch.equal(value, expected[each])
            else:  # a sum of k gradients in another order differs by at most (k - 1) u of the sum of their sizes
                torch.testing.assert_close(value, expected[each], rtol=1e-4, atol=1e-5)


def test_every_order_that_is_legal_is_estimated_as_a_plain_step_is():
    model, example = network("unet")
    graph, inputs = capture(model, example)
    costs = graph_costs(graph, inputs)
    assert estimate(costs, range(costs.count))[0] == pytest.approx(simulate(model, example).bytes, rel=0.25)


def test_random_numbers_and_changes_in_place_keep_their_order():
    class Drawing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            one = nn.functional.dropout(x * self.weight, 0.5)
            self.count.add_(1)
            two = nn.functional.dropout(x * self.weight, 0.5) * (self.count + 0)
            self.count.mul_(3)
            return one + 2 * two + self.count

    model, x = Drawing(), torch.randn(50, 4)
    torch.manual_seed(0)
    expected = model(x)
    model.count.zero_()
    trained = order(model, x).apply()
    torch.manual_seed(0)
    assert torch.equal(trained(x), expected)
    assert model.count == 3


def test_a_plan_of_another_graph_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    plan = plan_graph(model, torch.ones(5, 4), memory=1.0)
    with pytest.raises(ValueError, match="another graph"):
        order(model, torch.ones(6, 4), plan)
