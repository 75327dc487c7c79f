"""bptt inside of what trains models: wrappers that reduce gradients, accelerators."""

import pytest
import torch
from bptt_helpers import loop, outcome, planned
from torch import nn

from rmm_linear.planning import bptt

T, B, H = 50, 3, 8


class Tagger(nn.Module):
    """A recurrent layer and a head, with a plain loop or with bptt."""

    def __init__(self, run):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head, self.run = nn.LSTMCell(H, H), nn.Linear(H, 2), run

    def forward(self, x):
        state = torch.zeros(B, H), torch.zeros(B, H)
        return self.head(self.run(self.cell, x, state)[0])


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_distributed_data_parallel_reduces_the_sum_once(group):
    x, found = torch.randn(T, B, H), []
    for run in (loop, planned(slots=5)):
        model = nn.parallel.DistributedDataParallel(Tagger(run))
        reduced = []
        model.register_comm_hook(None, lambda _, bucket, seen=reduced: seen.append(1) or _done(bucket))
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
        assert len(reduced) == 2
    assert all(torch.equal(old, new) for old, new in zip(*found, strict=True))


def _done(bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_layers_on_top_of_each_other():
    """Each has frames of its own, and the upper one's inputs need gradients."""
    torch.manual_seed(0)
    one, two, x = nn.LSTMCell(H, H), nn.GRUCell(H, H), torch.randn(T, B, H, requires_grad=True)

    def gradients(run):
        zeros = torch.zeros(B, H)
        lower, _ = run(one, x, (zeros, zeros))
        upper, _ = run(two, lower, zeros)
        return torch.autograd.grad(upper.square().mean(), [x, *one.parameters(), *two.parameters()])

    for old, new in zip(gradients(loop), gradients(planned(slots=4)), strict=True):
        assert (old - new).norm() <= 1e-5 * old.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{"slots": 0}, {"slots": 9}, {"slots": 9, "internal": False}], ids=str)
def test_dropout_repeats_on_a_gpu(options):
    """The same kernels run on the same numbers in the same order; sums inside of a product may run in another one."""
    torch.manual_seed(0)
    cell = nn.LSTMCell(H, H, device="cuda")
    state = (torch.zeros(B, H, device="cuda"), torch.zeros(B, H, device="cuda"))
    x = torch.randn(T, B, H, device="cuda", requires_grad=True)

    def dropping(x, state):
        h, c = cell(nn.functional.dropout(x, 0.3), state)
        return h, (h, c)

    given = dropping, x, state, list(cell.parameters())
    expected = outcome(_seeded(loop), *given)
    found = outcome(_seeded(planned(**options)), *given)
    for old, new in zip((*expected[0], *expected[1]), (*found[0], *found[1]), strict=True):
        assert old is None or (old - new).norm() <= 1e-5 * old.norm()
    assert bptt(cell, x, None, memory="1MB")[0].device == x.device


def _seeded(run):
    def inner(*arguments):
        torch.cuda.manual_seed(0)
        return run(*arguments)

    return inner
