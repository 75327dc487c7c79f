"""Budgets for torch.compile: peaks are those of the graphs, fall with the budget, and gradients stay the same."""

import logging
import re

import pytest
import torch
from functorch.compile import make_boxed_func
from planning_graph_helpers import mlp
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import custom_graph_pass

from rmm_linear import convert
from rmm_linear.planning import CompileBudget, KnapsackSolver, Partition, compile_budget
from rmm_linear.planning.graphs import knapsack

pytestmark = [
    pytest.mark.usefixtures("no_graphs_left"),
    pytest.mark.skipif(not hasattr(custom_graph_pass, "CustomKnapsackSolver"), reason="it asks no solvers of others"),
]

BATCH, WIDTH = 64, 32


class Squared(nn.Module):
    """Three linear layers, whose step's peak is known."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).square()
        return x.sum()


def torchs(budget, solver="dp"):
    def partition(graph, inputs, **named):
        with config.patch(activation_memory_budget=budget, activation_memory_budget_solver=solver):
            return min_cut_rematerialization_partition(graph, inputs, **named)

    return partition


def deep():
    torch.manual_seed(0)
    return mlp(width=WIDTH, blocks=2, p=0.1)


def images():
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 16, 3), Residual1d(), Residual1d(), nn.Flatten())


class Residual1d(nn.Sequential):
    """A residual block that changes buffers."""

    def __init__(self):
        super().__init__(nn.Conv1d(16, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU(inplace=True))

    def forward(self, x):
        return x + super().forward(x)


class Attends(nn.Module):
    """Attention between linear layers."""

    def __init__(self, dropout):
        super().__init__()
        self.before, self.after, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x):
        heads = (part.view(4, -1, 2, WIDTH // 2).transpose(1, 2) for part in self.before(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(*heads, dropout_p=self.dropout)
        return x + self.after(mixed.transpose(1, 2).flatten(0, 1).flatten(1))


def attends(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), *(Attends(dropout) for _ in range(4)))


def step(partition, make=deep):
    """The partition of a compiled step, its two graphs, and its gradients."""
    found = []

    def judged(graph, inputs, **named):
        split = partition(graph, inputs, **named)
        found.append((Partition.of(split[0].graph, split[1].graph, named["num_fwd_outputs"]), split))
        return split

    def runs(graph, _):
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    model = make()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=runs, bw_compiler=runs, partition_fn=judged))
    torch.manual_seed(1)
    compiled(torch.randn(BATCH, WIDTH if make is Squared else 8)).square().mean().backward()
    return (*found[0], [p.grad for p in model.parameters()])


@pytest.fixture(scope="module")
def exact():
    return step(torchs(1.0))


@pytest.fixture(scope="module")
def lowest():
    budget = CompileBudget("least")
    step(budget)
    return budget.graphs[0][1].peak


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_peak_of_a_step_that_is_known():
    partition, (forward, _), _ = step(torchs(1.0), Squared)
    block = BATCH * WIDTH * 4
    saved = len(forward.graph.output_node().args[0]) - 1
    assert saved >= 3  # what x.square() needs of each layer
    # The passes meet at the loss: all that is saved, and the gradients of one layer, its input's and its weight's.
    assert 4 * block <= partition.peak <= 7 * block + 3 * WIDTH * WIDTH * 4


def test_peaks_fall_with_torchs_share_and_gradients_stay(exact):
    peaks = []
    for share in (0.5, 1e-9):
        partition, _, gradients = step(torchs(share, KnapsackSolver()))
        peaks.append(partition.peak)
        assert same(gradients, exact[2])
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.9 * exact[0].peak
    assert peaks[-1] <= min(step(torchs(share))[0].peak for share in (0.1,))


def test_bytes_are_a_bound_and_the_fastest_within_them_is_taken(exact, lowest):
    work = []
    for memory in (exact[0].peak, 0.8, lowest):
        budget = CompileBudget(memory)
        found, _, gradients = step(budget)
        plain, chosen = budget.graphs[0]
        assert plain == exact[0]
        assert chosen == found
        assert found.peak <= (memory if isinstance(memory, int) else memory * exact[0].peak)
        assert same(gradients, exact[2])
        work.append(found.work)
    assert work == sorted(work)
    assert work[0] == exact[0].work


def test_less_than_any_partition_needs_is_an_error_that_says_what_it_needs(lowest):
    share = rf"{lowest} bytes \(.*\), \d+ % of the exact peak"
    with pytest.raises(Exception, match=rf"fits into memory=0.01 \(.*\): it needs at least {share}"):
        step(CompileBudget(0.01))


def test_nothing_runs_again_that_reads_what_the_step_changes():
    expected = step(torchs(1.0), images)
    found = step(CompileBudget("least"), images)
    assert same(found[2], expected[2])
    assert found[0].peak < expected[0].peak


@pytest.mark.parametrize("make", [deep, images, attends])
def test_proposals_are_judged_as_the_graphs_that_torch_makes_of_them(make, monkeypatch):
    peaks = []
    found = knapsack._peak_of

    def kept(*args):
        peaks.append(found(*args))
        return peaks[-1]

    monkeypatch.setattr(knapsack, "_peak_of", kept)
    partition, _, _ = step(torchs(1e-9, KnapsackSolver(1)), make)
    assert len(peaks) > 1
    assert partition.peak == min(peaks)


@pytest.mark.parametrize(("dropout", "runs_again"), [(0.0, True), (0.1, False)])
def test_attention_runs_again_unless_it_draws_numbers(dropout, runs_again):
    _, (_, backward), _ = step(torchs(1e-9, KnapsackSolver(1)), lambda: attends(dropout))
    names = {str(node.target) for node in backward.graph.nodes}
    forward = [name for name in names if "attention" in name and "backward" not in name]
    assert bool(forward) == runs_again


def test_codes_are_saved_and_not_made_again():
    def converted():
        model = deep()
        convert(model, min_rows=8)
        return model

    _, (forward, backward), found = step(CompileBudget("least"), converted)
    codes = {node.name for node in forward.graph.nodes if "rmm_linear" in str(node.target)}
    assert codes
    assert codes.isdisjoint(node.name for node in backward.graph.nodes if node.op == "call_function")
    assert same(found, step(torchs(1.0), converted)[2])


def test_what_is_no_budget():
    with pytest.raises(ValueError, match="memory"), compile_budget("8 potatoes"):
        pass
    with pytest.raises(ValueError, match="memory"):
        KnapsackSolver(-1)
    for share in (0.5, "60%", "least"):
        with pytest.raises(ValueError, match="Shares are torch's own"):
            KnapsackSolver(share)


def test_a_budget_without_effect_is_told(caplog):
    torch._dynamo.reset()
    with compile_budget("1GB"):
        torch.compile(Squared(), backend="eager")(torch.randn(BATCH, WIDTH)).backward()
    (told,) = (record.message for record in caplog.records if record.levelno >= logging.WARNING)
    assert re.search(r"'1GB'\) had no effect.*first step there.*inductor.*reset\(\)", told)


def test_a_second_graph_is_told(caplog):
    budget = CompileBudget("1GB")
    step(budget, Squared)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    step(budget, Squared)
    (told,) = (record.message for record in caplog.records if record.levelno >= logging.WARNING)
    assert re.search("second training graph.*budget for itself.*rmm_linear.fit", told)
    assert len(budget.graphs) == 2


@pytest.mark.thorough
def test_inductor_takes_the_budget():
    torch._dynamo.reset()
    model, x = mlp(width=WIDTH, blocks=2, p=0.0), torch.randn(BATCH, 8)
    torch.compile(model)(x).square().mean().backward()  # what is cached has no budget
    torch._dynamo.reset()
    model.zero_grad(set_to_none=True)
    with compile_budget("least") as budget:
        torch.compile(model)(x).square().mean().backward()
    (exact, chosen), *others = budget.graphs
    assert not others
    assert chosen.peak < exact.peak
    found = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])
