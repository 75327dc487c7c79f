"""What operators take beyond their results, and the allocator's peak, which it explains."""

import copy

import pytest
import torch
from planning_graph_helpers import NETWORKS, network
from torch import nn

from rmm_linear.planning import plan_blocks, plan_graph, simulate, workspace
from rmm_linear.planning.step.step import run_step
from rmm_linear.planning.step.workspace import allocator_peak

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning:torch"), pytest.mark.usefixtures("no_graphs_left")]
# Simulated and allocated bytes: what the workspace is for. 3 % leaves room for alignment and for numbers of the loss.
CLOSE = 0.03


def allocated(model, run):
    model.zero_grad(set_to_none=True)
    found = allocator_peak(run)
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("name", NETWORKS)
def test_workspace_explains_the_allocators_peak(name):
    """That of transformers needs none for three percent."""
    model, example = network(name)
    peak = simulate(model, example, workspace(model, example) if name in ("cnn", "unet") else None).bytes
    assert peak >= simulate(model, example).bytes
    assert allocated(model, lambda: run_step(model, example)) == pytest.approx(peak, rel=CLOSE)


def test_it_counts_in_plans():
    model, example = network("cnn", blocks=2)
    beyond = workspace(model, example)
    with_it = plan_graph(model, example, memory="least", workspace=beyond)
    assert with_it.plain == simulate(model, example, beyond).bytes
    assert with_it.predicted == simulate(with_it, example, beyond).bytes
    blocks = plan_blocks(model, example, memory="least", workspace=beyond)
    assert blocks.predicted == simulate(blocks, example, beyond).bytes == blocks.memory


def test_what_an_operator_gives_back_is_counted_once():
    library = torch.library.Library("rmm_workspace", "DEF")  # gone with the test
    library.define("wasteful(Tensor x) -> Tensor")

    def wasteful(x):
        inner = torch.ones(1000)  # 4000 bytes, given back
        return x + inner[0] * 0

    library.impl("wasteful", wasteful, "CompositeExplicitAutograd")

    class Wasting(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(10))

        def forward(self, x):
            with torch.no_grad():
                wasted = torch.ops.rmm_workspace.wasteful(x)
            return (wasted * self.weight).sum()

    sizes = {name: size for (name, _), size in workspace(Wasting(), torch.ones(10)).items()}
    assert 4000 <= sizes["rmm_workspace::wasteful"] < 4200  # and what it multiplies and adds


def test_the_model_is_left_as_it_was():
    model, example = network("cnn")
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    workspace(model, example)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
