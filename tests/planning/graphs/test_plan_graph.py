"""Planned graphs: within the budget, predicted to the byte, and the same gradients and buffers to the bit."""

import dataclasses
import gc
import re

import pytest
import torch
from planning_graph_helpers import NETWORKS, gradients, mlp, network, same
from torch import nn
from torch.utils.checkpoint import checkpoint

import rmm_linear
from rmm_linear.memory import peak
from rmm_linear.planning import backend, load_plan, order, plan_graph, simulate
from rmm_linear.planning.graphs.capture import CaptureError, capture
from rmm_linear.planning.graphs.piece_costs import estimate
from rmm_linear.planning.graphs.pieces import RecomputedPiece, simulate_graph
from rmm_linear.planning.graphs.record import graph_costs
from rmm_linear.planning.graphs.search import Search
from rmm_linear.planning.step.step import loss_of, run_step

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning:torch"), pytest.mark.usefixtures("no_graphs_left")]


def real_peak(run, inputs):
    """Live bytes of a step of a graph on its real inputs."""
    for each in inputs:
        if isinstance(each, torch.Tensor):
            each.grad = None
    gc.collect()
    with peak("cpu") as measured:
        outputs = run(*inputs)
        first = outputs[0]
        loss = loss_of(first if first.dim() == 0 else outputs)
        del outputs, first
        loss.backward()
    return measured.bytes


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name != "cnn")) for name in NETWORKS],
)
def test_a_planned_graph_fits_and_changes_no_bit(name):
    model, example = network(name)
    expected = gradients(model, lambda: run_step(model, example), restore=True)
    plan = plan_graph(model, example, memory=0.65)
    assert plan.predicted <= plan.memory == int(0.65 * plan.plain)
    assert plan.recomputed

    planned = plan.apply()
    assert same(gradients(model, lambda: run_step(planned, example)), expected)

    graph, inputs = capture(model, example)
    pieces = plan.run(graph, inputs)
    assert any(isinstance(piece, RecomputedPiece) for piece in pieces.children())
    assert real_peak(pieces, inputs) == plan.predicted
    assert real_peak(graph, inputs) == plan.plain


@pytest.mark.thorough
def test_other_methods_are_not_better():
    model, example = network("mlp")
    plans = [plan_graph(model, example, memory=0.8, method=one) for one in ("cuts", "chen", "kusumoto")]
    assert all(plan.predicted <= plan.memory for plan in plans)
    assert plans[0].seconds == min(plan.seconds for plan in plans)


def test_all_lower_sets_of_a_small_graph_are_used_and_those_of_a_large_one_refused():
    torch.manual_seed(0)
    model = nn.Sequential(*(each for _ in range(8) for each in (nn.Linear(16, 16), nn.Tanh())))
    plan = plan_graph(model, torch.ones(500, 16), memory=0.8, method="kusumoto-exact")
    assert plan.predicted <= plan.memory
    wide, example = network("llama")
    with pytest.raises(ValueError, match=r"at most 3,000; it has (more than )?[\d,]+"):
        plan_graph(wide, example, memory=0.5, method="kusumoto-exact")


def test_a_backend_plans_every_shape_once():
    model, example = network("mlp")
    expected = [gradients(model, lambda rows=rows: run_step(model, example[:rows])) for rows in (64, 32, 64)]
    planner = backend(memory=0.8)
    planned = torch.compile(model, backend=planner, dynamic=False)
    for rows, each in zip((64, 32, 64), expected, strict=True):
        assert same(gradients(model, lambda rows=rows: run_step(planned, example[:rows])), each)
    assert len(planner.plans) == 2
    assert all(plan.recomputed for plan in planner.plans.values())


class Broken(nn.Module):
    """Its graph ends where a value decides."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        y = self.inner(x)
        return y * 2 if y.sum().item() > 0 else y


class Checkpointed(nn.Linear):
    """Has activation checkpointing of its own."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def converted():
    model = mlp()
    rmm_linear.convert(model, ratio=0.5, min_rows=1)
    return model


X = torch.ones(64, 8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: plan_graph(Broken(), X[:, :4], memory=0.9), CaptureError, r"(?s)test_plan_graph.py.*plan_blocks"),
        (lambda: plan_graph(converted(), X, memory=0.9), CaptureError, "converted.* draws its sketches in another ord"),
        pytest.param(
            lambda: torch.compile(converted(), backend=backend(memory=0.5), dynamic=False)(X),
            torch._dynamo.exc.BackendCompilerFailed,
            "draws its sketches in another order",
            marks=pytest.mark.thorough,
        ),
        (lambda: plan_graph(Checkpointed(8, 2), X, memory=0.5), CaptureError, r"has its own\. Turn it off"),
        (lambda: plan_graph(mlp(), lambda: 1, memory=0.5), CaptureError, r"got a function\. Pass the batch"),
        (lambda: simulate(order(mlp(), X).apply(), X), ValueError, "got a compiled model"),
        (lambda: plan_graph(mlp(), X, memory=0.5, method="kusumuto"), ValueError, "Did you mean 'kusumoto'"),
        (lambda: plan_graph(mlp(), X, memory=0.01), ValueError, r"the least found is \d+ bytes"),
    ],
    ids=["no graph", "converted", "converted, compiled", "checkpoints", "function", "compiled", "method", "memory"],
)
def test_what_cannot_be_planned_is_refused_with_the_remedy(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_plan_is_checked_when_it_is_read(tmp_path):
    plan = order(mlp(), X)
    dataclasses.replace(plan, order=[0, 1, 2]).save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="order must have each of the"):
        load_plan(tmp_path / "plan.json")


def test_evaluation_and_other_shapes_need_no_plan_of_their_own():
    model, x = network("cnn", blocks=2)
    model.stem[1].eval()  # a part in evaluation mode is planned as such
    larger = torch.cat([x, x])
    made = backend(memory=simulate(model, x).bytes)
    trained = torch.compile(model, backend=made, dynamic=False)
    with torch.no_grad():
        trained(larger)
    assert made.plans == {}
    run_step(trained, x)
    assert len(made.plans) == 1
    expected = gradients(model, lambda: run_step(model, larger), restore=True)
    for plan in (plan_graph(model, x, memory="least"), order(model, x)):
        assert simulate(plan, x).bytes == plan.predicted
        trained = plan.apply()
        assert same(gradients(model, lambda trained=trained: run_step(trained, larger), restore=True), expected)


class Halved(nn.Module):
    """Two stacks of blocks, between which no graph goes."""

    def __init__(self):
        super().__init__()
        self.one, self.between, self.two = mlp(), nn.Linear(3, 8), mlp()

    def forward(self, x):
        x = self.one(x)
        torch._dynamo.graph_break()
        return self.two(self.between(x))


class Looping(nn.Module):
    """Blocks in a loop that no graph goes through, so that each block is a graph."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(mlp(blocks=2) for _ in range(3))
        self.between = nn.Linear(3, 8)

    def forward(self, x):
        for layer in self.layers:
            x = self.between(layer(x))
            torch._dynamo.graph_break()
        return x


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("kind", "why"), [(Halved, r"graph_break\(\)"), (Looping, "Looping.forward runs without")])
def test_where_graphs_break_blocks_are_recomputed_and_it_is_said_why(kind, why, caplog):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(64, 8)
    expected = gradients(model, lambda: run_step(model, x))
    made = backend(memory=0.5)
    trained = torch.compile(model, backend=made, dynamic=False)
    assert same(gradients(model, lambda: run_step(trained, x)), expected)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.search(why, said)
    assert "test_plan_graph.py:" in said
    assert "plan_blocks" in said
    assert {plan.method for plan in made.plans.values()} == {"blocks"}
    assert all(plan.recomputed for plan in made.plans.values())
    if kind is Halved:
        assert all(len(plan.recomputed) == 6 and plan.predicted < 0.6 * plan.plain for plan in made.plans.values())


@pytest.mark.thorough
def test_the_least_peak_is_no_higher_than_any_that_was_met():
    model, example = network("cnn")
    least = plan_graph(model, example, memory="least")
    assert least.predicted == least.memory < least.plain


class Overwritten(nn.Module):
    """Wide convolutions whose results are overwritten: the plan with the least peak cuts before the ReLU."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(32, 32, 3, padding=1)),
            *(nn.ReLU(inplace=True), nn.MaxPool2d(4), nn.Conv2d(32, 8, 3), nn.ReLU(inplace=True), nn.Flatten()),
        )

    def forward(self, x):
        return self.layers(x)


def test_a_piece_may_begin_with_what_overwrites_the_one_before():
    torch.manual_seed(0)
    model, x = Overwritten(), torch.randn(2, 3, 48, 48)
    plan = plan_graph(model, x, memory="least")
    chen = plan_graph(model, x, memory="least", method="chen")
    assert plan.predicted < 0.8 * chen.predicted
    begins = [piece for piece in plan.pieces[1:] if "relu" in piece.first or piece.first in ("input_2", "input_4")]
    assert begins
    assert all(piece.choice == "keep" for piece in begins)  # run again, it would overwrite what is gone
    expected = gradients(model, lambda: run_step(model, x))
    trained = plan.apply()
    assert same(gradients(model, lambda: run_step(trained, x)), expected)
    graph, inputs = capture(model, x)
    assert real_peak(plan.run(graph, inputs), inputs) == plan.predicted


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("mlp", "cuts"), ("cnn", "cuts"), ("unet", "kusumoto")),
        *(pytest.param(*one, marks=pytest.mark.thorough) for one in (("unet", "cuts"), ("llama", "chen"))),
    ],
)
def test_the_formula_that_ranks_proposals_is_near_the_simulation(name, method):
    model, example = network(name)
    graph, inputs = capture(model, example)
    costs = graph_costs(graph, inputs)
    plain = simulate_graph(costs, graph).bytes
    search = Search(costs, plain)
    assert estimate(costs, ([0] * costs.count, set()))[0] == pytest.approx(plain, rel=0.03)
    search.propose(method, 0)
    _, peak = search.smallest()
    assert peak <= plain
    for key, found in search.judged.items():  # what the engine adds up in passing is not in the formula
        assert search.proposals[key].estimated == pytest.approx(found, rel=0.15)
