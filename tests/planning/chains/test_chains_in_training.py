"""Chains inside of models that train: distributed data parallel, layers on top of each other, an accelerator."""

import pytest
import torch
from bptt_helpers import B, H, loop, outcome, planned
from planning_helpers import plain
from torch import nn

from rmm_linear.planning import SweepReport, bptt, sweep

T = 50


class Solver(nn.Module):
    """A model whose forward pass is a chain of calls of its own method."""

    def __init__(self, run):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head, self.run = nn.Linear(H, H), nn.Linear(H, 1), run

    def advance(self, _, u):
        return torch.tanh(self.cell(u))

    def roll(self, x, u):
        return None, self.advance(x, u)

    def forward(self, u):
        return self.head(self.run(self, u))


def trained(model, hook=None):
    """Losses of a training of five steps."""
    wrapped = model if hook is None else nn.parallel.DistributedDataParallel(model)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = wrapped(torch.ones(B, H)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    "run",
    [
        lambda model, u: bptt(model.roll, torch.zeros(12, 1), u, slots=3)[1],
        lambda model, u: sweep(model.advance, u, 12, slots=3, store="cpu", interval=4),
    ],
    ids=["bptt", "sweep"],
)
def test_distributed_data_parallel_reduces_the_sum_once(run, process_group):
    """Its hooks see every parameter once, or the second step fails; a method of a module finds the module's own."""
    reduced = []

    def hook(_, bucket):
        reduced.append(1)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    expected = trained(Solver(lambda model, u: plain(model.advance, u, 12)))
    assert trained(Solver(run), hook) == expected
    assert expected[-1] < 0.5 * expected[0]
    assert len(reduced) == 5


def test_layers_on_top_of_each_other():
    """Each stores states of its own, and the upper one's inputs need gradients."""
    torch.manual_seed(0)
    one, two, x = nn.LSTMCell(H, H), nn.GRUCell(H, H), torch.randn(T, B, H, requires_grad=True)

    def gradients(run):
        zeros = torch.zeros(B, H)
        lower, _ = run(one, x, (zeros, zeros))
        upper, _ = run(two, lower, zeros)
        return torch.autograd.grad(upper.square().mean(), [x, *one.parameters(), *two.parameters()])

    for old, new in zip(gradients(loop), gradients(planned(slots=4)), strict=True):
        assert (old - new).norm() <= 1e-5 * old.norm()


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(H, H)

    def forward(self, x, state):
        h, c = self.cell(nn.functional.dropout(x, 0.3), state)
        return h, (h, c)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"slots": 0}, {"slots": 9}, {"slots": 9, "internal": False}], ids=str)
def test_dropout_repeats_on_an_accelerator(options):
    """The same kernels run on the same numbers in the same order; sums inside of a product may run in another one."""
    cell, x = Dropping().cuda(), torch.randn(T, B, H, device="cuda", requires_grad=True)
    state = (torch.zeros(B, H, device="cuda"), torch.zeros(B, H, device="cuda"))
    expected, found = (outcome(run, cell, x, state) for run in (loop, planned(**options)))
    for old, new in zip((*expected[0], *expected[1]), (*found[0], *found[1]), strict=True):
        assert old is None or (old - new).norm() <= 1e-5 * old.norm()
    assert bptt(cell.cell, x, None, memory="1MB")[0].device == x.device


@pytest.mark.gpu
@pytest.mark.parametrize("store", ["cpu", "folder"])
def test_a_sweep_on_an_accelerator(store, tmp_path):
    """States go through pinned memory on a stream of their own, and the device's generator repeats."""
    device, report = torch.device("cuda"), SweepReport()
    place = tmp_path / "store" if store == "folder" else store
    cell, u = nn.Linear(256, 256, device=device), torch.randn(512, 256, device=device, requires_grad=True)

    def step(number, u):
        return torch.tanh(cell(nn.functional.dropout(u, 0.1)))

    def gradients(run):
        torch.manual_seed(1)
        return torch.autograd.grad(run().square().sum(), [u, *cell.parameters()])

    expected = gradients(lambda: plain(step, u, 60))
    for interval in (5, "auto"):
        options = {"slots": 3, "store": place, "interval": interval, "report": report}
        with device:  # as under torch.set_default_device
            found = gradients(lambda options=options: sweep(step, u, 60, **options))
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))
