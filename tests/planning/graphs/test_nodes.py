"""Costs per node of a graph, and the picture of memory over a step."""

import pytest
import torch
from planning_graph_helpers import network
from torch import nn

from rmm_linear.planning import CaptureError, measure, plan_blocks, plan_graph, plot_memory, simulate, workspace
from rmm_linear.planning.blocks.find import owner_of

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning:torch"), pytest.mark.usefixtures("no_graphs_left")]


def test_nodes_say_what_they_save_make_and_change():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(16, 2))
    costs = measure(model, torch.ones(10, 8), nodes=True)
    first, relu, dropout, last = costs.nodes
    assert [node.module for node in costs.nodes] == ["0", "1", "2", "3"]
    assert (first.flops, last.flops) == (2 * 10 * 8 * 16, 2 * 10 * 16 * 2)
    assert (first.storages, first.transient) == ((), 0)  # its result is what the ReLU saves
    assert relu.storages == (10 * 16 * 4,)
    assert relu.writes
    assert dropout.random
    assert not first.random
    assert last.storages == (10 * 16 * 4,)  # the result of the dropout
    assert last.transient == 10 * 2 * 4
    assert all(node.seconds >= 0 for node in costs.nodes)
    table = costs.node_table()
    assert all(node.name in table for node in costs.nodes)


def test_all_that_is_saved_is_saved_by_a_node():
    model, example = network("unet")
    costs = measure(model, example, nodes=True, workspace=True)
    names = [block.name for block in costs.blocks]  # without the pooling, which runs on every level
    saved = sum(sum(node.storages) for node in costs.nodes if owner_of(node.module, names))
    blocks = sum(sum(block.storages) for block in costs.blocks)
    assert saved == blocks - example.nbytes  # blocks count the batch, which the first convolution saves
    assert costs.workspace == workspace(model, example) != {}  # norms have some on every processor


def test_nodes_need_a_graph():
    class Breaking(nn.Linear):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    with pytest.raises(CaptureError, match="cannot be captured as one graph"):
        measure(nn.Sequential(Breaking(4, 4)), torch.ones(2, 4), nodes=True)


def test_a_simulated_plan_names_its_pieces_and_memory_over_a_step_is_plotted():
    model, example = network("unet", depth=2)
    plan = plan_graph(model, example, memory=0.65)
    planned = simulate(plan, example)
    assert planned.bytes == plan.predicted
    names = {f"{piece.first} … {piece.last}" for piece in plan.pieces}
    assert planned.by_module.keys() <= names | {""}
    assert sum(planned.by_module.values()) == planned.bytes
    assert any(name in planned.moment for name in names)
    peaks = {"plain": simulate(model, example), "planned": planned}
    peaks["blocks"] = simulate(plan_blocks(model, example, memory=0.8), example)
    ax = plot_memory(peaks)
    lines = [line for line in ax.lines if len(line.get_xdata()) > 2]
    for line, (label, peak) in zip(lines, peaks.items(), strict=True):
        assert line.get_label().startswith(label)
        assert max(line.get_ydata()) == peak.bytes / 2**20
        assert list(line.get_xdata()) == sorted(line.get_xdata())
        assert line.get_xdata()[-1] == 2
    with pytest.raises(ValueError, match=r"planning\.simulate"):
        plot_memory({})
