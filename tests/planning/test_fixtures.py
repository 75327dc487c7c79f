"""Files that version 0.1.0 wrote are read: never write them again."""

import shutil
from pathlib import Path

import pytest
import torch

from rmm_linear import RMMConfig
from rmm_linear.planning import BlockPlan, BPTTPlan, ChainPlan, GraphPlan, StoreError, load_plan, open_store

FIXTURES = Path(__file__).parent / "fixtures"
STATE = [
    torch.tensor([[0.0, 0.25, 0.5], [0.75, 1.0, 1.25]]),
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.tensor(7),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j]),
    torch.empty(0, 3),
]


def test_a_plan_of_blocks():
    plan = load_plan(FIXTURES / "blocks.json")
    assert isinstance(plan, BlockPlan)
    assert [block.option for block in plan.blocks] == [
        "keep",
        "recompute",
        "selective",
        "nested",
        "convert tenth",
        "offload",
    ]
    nested, converted = plan.blocks[3:5]
    assert (nested.name, nested.inner, nested.kept, nested.worst, nested.seconds) == (
        "3",
        ("3.0", "3.2"),
        512,
        7000,
        0.5,
    )
    assert converted.noise == 0.01
    assert (plan.memory, plan.predicted, plan.plain, plan.flops) == (20000, 19000, 40000, 1.25)
    assert plan.moment == "backward of 4"
    assert plan.config == RMMConfig(
        kind="countsketch", ratio=0.1, bits=4, operations=("linear", "activation"), target_modules=("4.*",)
    )


def test_a_plan_of_a_graph():
    plan = load_plan(FIXTURES / "graph.json")
    assert isinstance(plan, GraphPlan)
    assert (plan.method, plan.graph, plan.asked) == ("chen", "f4df8619bfbe6ba5", "least")
    assert ([*plan.part], [*plan.recomputed], [*plan.order]) == ([0] * 4 + [1] * 4 + [2] * 4, [0, 1], [])
    assert [(piece.first, piece.choice, piece.saved) for piece in plan.pieces] == [
        ("input_1", "recompute", 128000),
        ("input_5", "recompute", 128000),
        ("input_9", "keep", 128000),
    ]
    assert (plan.memory, plan.predicted, plan.plain) == (322184, 322184, 449096)


def test_plans_of_chains():
    assert ChainPlan.load(FIXTURES / "chain.json") == ChainPlan(7, (0, 5, 9, 12, 14, 15))
    plan = BPTTPlan.load(FIXTURES / "bptt.json")
    assert plan == BPTTPlan(50, 16, 4, state_bytes=100, graph_bytes=400, plain_bytes=350)
    assert plan.forward_steps == 103


def test_a_stored_state(tmp_path):
    store = open_store(tmp_path)
    shutil.copy(FIXTURES / "state.safetensors", store.path("state-3"))
    found = store.get("state-3")
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in STATE]
    assert all(map(torch.equal, found, STATE))
    store.put("state-4", STATE)
    assert store.path("state-4").stat().st_size == store.path("state-3").stat().st_size
    shutil.copy(FIXTURES / "state.safetensors", store.path("state-4"))  # its digest knows its key
    with pytest.raises(StoreError, match="digest"):
        store.get("state-4")
    store.close()
