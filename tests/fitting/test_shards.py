import itertools

import pytest
import torch
from static_memory_helpers import network, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore

from rmm_linear.fitting.shards import Shards
from rmm_linear.fitting.static_memory import StaticMemory, static_memory


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("as_view", [False, True])
def test_buckets(group, as_view):
    model = network()
    model[0].weight.requires_grad_(False)
    plain = static_memory(model, AdamW)
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
    found = static_memory(wrapped, AdamW)
    assert found.ddp_buckets == (0 if as_view else plain.gradients)
    assert found.parameters == plain.parameters
    assert found.optimizer == plain.optimizer
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        static_memory(wrapped, shards=Shards(2))


class Blocks(nn.Module):
    """An embedding, three blocks of which the second is larger, and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, width), nn.Linear(width, 6)) for width in (4, 8, 2))
        self.head = nn.Linear(6, 3)
        self.register_buffer("mask", torch.zeros(7))

    def forward(self, ids):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def padded(rows, columns=1, ranks=4):
    return -(-rows // ranks) * columns * 4


def test_shards_by_hand():
    model = Blocks()
    model.layers[2].requires_grad_(False)
    root = padded(10, 6) + padded(3, 6) + padded(3)
    layers = [padded(width, 6) + padded(width) + padded(6, width) + padded(6) for width in (4, 8, 2)]
    found = static_memory(model, AdamW, Shards(4))
    assert found.parameters == root + sum(layers)
    assert found.buffers == 7 * 4
    assert found.gradients == root + layers[0] + layers[1]
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    assert found.optimizer == 2 * found.gradients + 4 * trained
    moments = [
        layers[0] + layers[0] + layers[1],  # its parameters, its gradients, those of the block after it
        layers[0] + layers[1] + layers[1],  # the block before it is gathered; the one after it has no gradients
        layers[1] + layers[2],
    ]
    assert found.gathered == 4 * (2 * root + max(moments))


def test_shards_on_the_host():
    found = static_memory(Blocks(), AdamW, Shards(4, cpu_offload=True))
    kept = static_memory(Blocks(), AdamW, Shards(4))
    assert found == StaticMemory(buffers=kept.buffers, gathered=kept.gathered)


def test_shards_of_an_optimizer_with_state():
    model = Blocks()
    optimizer = AdamW(model.parameters())
    train(model, optimizer)
    assert static_memory(model, optimizer, Shards(4)) == static_memory(Blocks(), AdamW, Shards(4))


def test_shards_of_a_model_without_repeated_blocks():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
    assert static_memory(model, shards=Shards(2)).gathered == 3 * 32 * 4


@pytest.mark.parametrize(("ranks", "error"), [(0, ValueError), (True, TypeError), (1.5, TypeError)])
def test_wrong_ranks(ranks, error):
    with pytest.raises(error, match="ranks must be"):
        Shards(ranks)


def test_a_model_that_is_sharded_already(group):
    model = Blocks()
    expected = static_memory(Blocks(), AdamW, Shards(1))
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert static_memory(model, AdamW) == expected
    optimizer = AdamW(model.parameters(), foreach=False)
    assert static_memory(model, optimizer) == expected
    model(torch.arange(10)).sum().backward()
    optimizer.step()
    assert static_memory(model, optimizer) == expected
    with pytest.raises(ValueError, match="Leave shards out"):
        static_memory(model, shards=Shards(2))


class Residual(nn.Module):
    """A block of two large weights."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(256, width, bias=False), nn.Linear(width, 256, bias=False)

    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(hidden)))


def peak_of_a_backward_pass(run):
    """Of all that the CPU's allocator gives, the buffers of communication too."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes))


@pytest.mark.parametrize("widths", [(1024,) * 6, (512, 512, 2048, 256, 256)])
def test_what_fully_shard_gathers(widths):
    """Communication moves nothing here: only the memory of one rank out of four is looked at."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Sequential(*map(Residual, widths)))
        planned = static_memory(model, AdamW, Shards(4))
        mesh = init_device_mesh("cpu", (4,))
        for block in model[1]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert static_memory(model, AdamW) == planned

        def run():
            model.zero_grad()
            model(torch.ones(1, 256)).sum().backward()

        peak = peak_of_a_backward_pass(run)
    finally:
        torch.distributed.destroy_process_group()
    # At the worst moment, a rank has its own parts of some gradients, or of all.
    assert planned.gathered <= peak <= planned.gathered + planned.gradients
