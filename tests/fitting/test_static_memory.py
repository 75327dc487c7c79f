"""Static memory: parameters, buffers, gradients, the state of optimizers, and what ranks share; against real steps."""

import functools
import itertools
import logging
import random

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from bitsandbytes.optim import AdamW8bit
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Adafactor

from rmm_linear import memory
from rmm_linear.fitting.static_memory import StaticMemory, static_memory
from rmm_linear.memory.peak import LiveTensors, Peak
from rmm_linear.planning import simulate
from rmm_linear.planning.step.shards import Shards

FOREACH = functools.partial(AdamW, foreach=True)
LOOP = functools.partial(AdamW, foreach=False)
MOMENTUM = functools.partial(SGD, momentum=0.9)


def network(device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64), nn.Linear(64, 96))


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def state_bytes(optimizer):
    values = [value for state in optimizer.state.values() for value in state.values()]
    tensors = {id(value): value for value in values if isinstance(value, torch.Tensor)}  # some are shared
    return bytes_of(tensors.values())


def train(model, optimizer, steps=1):
    for _ in range(steps):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 0.01)
        optimizer.step()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_buffers_and_gradients(device):
    model = nn.Sequential(network(device), nn.BatchNorm1d(96, device=device))
    model[0][0].requires_grad_(False)
    found = static_memory(model)
    assert found.parameters == bytes_of(model.parameters())
    assert found.buffers == bytes_of(model.buffers())
    assert found.gradients == bytes_of(model.parameters()) - bytes_of(model[0][0].parameters())
    assert found.optimizer == found.optimizer_transient == found.ddp_buckets == found.gathered == 0
    assert found.before_step == found.parameters + found.buffers


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_that_is_shared_counts_once(device):
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50, bias=False), nn.Linear(4, 4, bias=False)).to(device)
    model[1].weight = model[0].weight
    model.register_buffer("window", model[2].weight.detach()[:2])
    model.register_buffer("whole", torch.zeros(6, 5, device=device))
    model.register_buffer("part", model.whole[1:3])
    found = static_memory(model, AdamW)
    assert (found.parameters, found.buffers, found.gradients) == ((400 + 16) * 4, 30 * 4, (400 + 16) * 4)
    assert found.optimizer == 2 * (400 + 16) * 4 + 2 * 4


def test_fake_tensors():
    with FakeTensorMode():
        model = network()
        assert static_memory(model, AdamW) == static_memory(network(), AdamW)
    assert static_memory(model, Adafactor) == static_memory(network(), Adafactor)


@pytest.fixture
def on_an_accelerator():
    """Fake tensors say that they are on one, which need not be there."""
    with FakeTensorMode():
        return nn.ParameterList([torch.empty(32, 32, device="cuda") for _ in range(5)])


@pytest.mark.parametrize(
    ("kind", "state", "transient"),
    [
        (AdamW, 2 * 5 * 4096, 5 * 4096),  # all at once; the numbers of the steps are on the CPU
        (LOOP, 2 * 5 * 4096, 3 * 4096),
        (functools.partial(AdamW, fused=True), 2 * 5 * 4096 + 5 * 4, 0),
        (MOMENTUM, 5 * 4096, 0),
    ],
)
def test_an_accelerator(kind, state, transient, on_an_accelerator):
    model = nn.ModuleList([on_an_accelerator, nn.Linear(50, 50)])  # the other one stays on the CPU
    found = static_memory(model, kind)
    assert (found.parameters, found.gradients, found.buffers) == (5 * 4096, 5 * 4096, 0)
    assert (found.optimizer, found.optimizer_transient) == (state, transient)


# State of optimizers


class Clipped(Optimizer):
    """Looks at values, as optimizers that adapt to the norms of their tensors do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("sum", torch.zeros_like(parameter)).add_(parameter.grad)
                    scale = min(1.0, 1 / (parameter.grad.norm().item() + 1e-6))
                    parameter.add_(parameter.grad + torch.rand_like(parameter), alpha=-group["lr"] * scale)


class Hopeless(Clipped):
    def step(self, closure=None):
        raise RuntimeError("no step without a closure.")


@pytest.mark.parametrize("kind", [AdamW, SGD, MOMENTUM, Adafactor, AdamW8bit, Adagrad, Clipped, FOREACH, LOOP])
def test_state_is_that_of_a_real_step(kind):
    model = network()
    optimizer = kind(model.parameters())
    fresh = static_memory(model, optimizer)
    by_class = static_memory(model, kind)
    assert static_memory(network("meta"), kind).optimizer == by_class.optimizer
    train(model, optimizer)
    assert fresh.optimizer == by_class.optimizer == state_bytes(optimizer)
    assert static_memory(model, optimizer).optimizer == state_bytes(optimizer)
    assert fresh.optimizer_transient == by_class.optimizer_transient


def test_state_in_numbers():
    model = network()
    parameters = bytes_of(model.parameters())
    count = len(list(model.parameters()))
    assert static_memory(model, AdamW).optimizer == 2 * parameters + count * 4  # the number of the step
    assert static_memory(model, SGD).optimizer == 0
    assert static_memory(model, MOMENTUM).optimizer == parameters
    factored = sum(sum(p.shape) if p.dim() == 2 else p.numel() for p in model.parameters())
    assert static_memory(model, Adafactor).optimizer == 4 * (factored + count)  # and the norm of each


def test_groups_and_frozen_parameters():
    model = network()
    model[0].weight.requires_grad_(False)
    groups = [
        {"params": [*model[0].parameters(), *model[1].parameters()]},
        {"params": [*model[2].parameters()], "momentum": 0.9},
        {"params": [*model[3].parameters()], "momentum": 0.5},
    ]
    optimizer = SGD(groups, lr=torch.tensor(0.1))
    expected = bytes_of(model[2].parameters()) + bytes_of(model[3].parameters())
    assert static_memory(model, optimizer).optimizer == expected
    train(model, optimizer)
    assert state_bytes(optimizer) == expected


def test_what_has_no_state_yet_is_added():
    model = network()
    optimizer = AdamW(model[0].parameters())
    train(model, optimizer)
    before = state_bytes(optimizer)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert static_memory(model, optimizer).optimizer == before + 2 * bytes_of(model[2].parameters()) + 2 * 4


def copied(model, optimizer):
    """All that a dry step must leave alone, copied."""
    tensors = [parameter.detach().clone() for parameter in model.parameters()]
    states = [(name, value) for p in model.parameters() for name, value in optimizer.state.get(p, {}).items()]
    names = [name for name, _ in states]
    tensors += [torch.as_tensor(value).clone() for _, value in states] + [torch.get_rng_state()]
    rest = [(p._version, id(p.grad)) for p in model.parameters()]
    return tensors, (names, rest, repr(optimizer.param_groups), random.getstate())


@pytest.mark.parametrize("kind", [AdamW, MOMENTUM, Adafactor, Clipped])
@pytest.mark.parametrize("steps", [0, 1])
def test_nothing_of_the_user_changes(kind, steps):
    model = network()
    optimizer = kind(model.parameters(), lr=torch.tensor(0.01)) if kind is AdamW else kind(model.parameters())
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("hook"))
    if kind is not Adafactor:
        LambdaLR(optimizer, lambda _: 1.0)  # adds keys to the groups, and patches the step
    train(model, optimizer, steps)
    called.clear()
    before = copied(model, optimizer)
    static_memory(model, optimizer)
    after = copied(model, optimizer)
    assert called == []
    assert after[1] == before[1]
    assert all(map(torch.equal, after[0], before[0]))


@pytest.mark.parametrize("kind", [FOREACH, LOOP, MOMENTUM, Adafactor, Clipped])
def test_the_transient_is_that_of_a_real_step(kind):
    model = network()
    optimizer = kind(model.parameters())
    found = static_memory(model, optimizer).optimizer_transient
    train(model, optimizer)
    result = Peak()
    with LiveTensors(result):
        optimizer.step()
    assert found == pytest.approx(result.bytes, abs=64)  # scalars
    assert static_memory(model, optimizer).optimizer_transient == found


def test_the_transient_of_all_tensors_at_once():
    model = network()
    largest = max(parameter.numel() * 4 for parameter in model.parameters())
    assert static_memory(model, FOREACH).optimizer_transient == bytes_of(model.parameters())
    assert static_memory(model, LOOP).optimizer_transient < 3 * largest
    assert static_memory(model, AdamW) == static_memory(model, LOOP)  # what PyTorch chooses on the CPU
    assert static_memory(network("meta"), AdamW) == static_memory(model, FOREACH)
    assert static_memory(model, functools.partial(AdamW, fused=True)).optimizer_transient == 0


def test_the_step_of_all_at_once_is_scaled_where_values_are_needed():
    """ASGD reads values, and is run on one parameter of each shape."""
    kind = functools.partial(torch.optim.ASGD, foreach=True)
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(6)])
    optimizer = kind(model.parameters())
    found = static_memory(model, kind)
    train(model, optimizer)
    result = Peak()
    with LiveTensors(result):
        optimizer.step()
    assert found.optimizer == state_bytes(optimizer)
    assert found.optimizer_transient == pytest.approx(result.bytes, rel=0.05)


def test_a_wrapped_optimizer():
    model = network()
    wrapped = AcceleratedOptimizer.__new__(AcceleratedOptimizer)  # without the state of an Accelerator, which is global
    wrapped.optimizer = MOMENTUM(model.parameters())
    assert static_memory(model, wrapped) == static_memory(model, MOMENTUM)


def test_an_optimizer_without_a_dry_step(caplog):
    model = network()
    for optimizer in (Hopeless, Hopeless(model.parameters())):
        with pytest.raises(ValueError, match=r"Hopeless raised RuntimeError: no step .* Make one real step first"):
            static_memory(model, optimizer)
    optimizer = Hopeless(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter]["sum"] = torch.zeros_like(parameter)
    with caplog.at_level(logging.WARNING):
        found = static_memory(model, optimizer)
    assert found.optimizer == bytes_of(model.parameters())
    assert found.optimizer_transient == 64 * 96 * 4
    assert "Hopeless cannot make a dry step" in caplog.text


@pytest.mark.parametrize("optimizer", ["adamw", 3])
def test_what_makes_no_optimizer(optimizer):
    with pytest.raises(TypeError, match="optimizer must be an instance"):
        static_memory(network(), optimizer)


# What ranks share


@pytest.mark.parametrize("as_view", [False, True])
def test_buckets(process_group, as_view):
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


def test_shards_of_an_optimizer_with_state_on_the_host_and_of_a_model_without_repeated_blocks():
    model, alone = Blocks(), static_memory(Blocks(), AdamW, Shards(4))
    optimizer = AdamW(model.parameters())
    train(model, optimizer)
    assert static_memory(model, optimizer, Shards(4)) == alone
    on_host = static_memory(Blocks(), AdamW, Shards(4, cpu_offload=True))
    there = alone.parameters + alone.gradients + alone.optimizer
    assert on_host == StaticMemory(buffers=alone.buffers, gathered=alone.gathered, host=there)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
    assert static_memory(model, shards=Shards(2)).gathered == 3 * 32 * 4


@pytest.mark.parametrize(("ranks", "error"), [(0, ValueError), (True, TypeError), (1.5, TypeError)])
def test_wrong_ranks(ranks, error):
    with pytest.raises(error, match="ranks must be"):
        Shards(ranks)


def test_a_model_that_is_sharded_already(process_group):
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
    """Of all that the CPU's allocator gives, with the buffers of communication."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes))


@pytest.mark.parametrize("widths", [(1024,) * 6, (512, 512, 2048, 256, 256)])
def test_what_fully_shard_gathers(widths):
    """Communication moves nothing here: only the memory of one rank out of four is measured."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Sequential(*map(Residual, widths)))
        planned = static_memory(model, AdamW, Shards(4))
        mesh = init_device_mesh("cpu", (4,))
        for block in model[1]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert static_memory(model, AdamW) == planned

        batch = torch.ones(1, 256)

        def run():
            model.zero_grad()
            model(batch).sum().backward()

        peak = peak_of_a_backward_pass(run)
        model.zero_grad()
        with memory.peak("cpu") as live:
            run()
        model.zero_grad()
        assert simulate(model, batch).bytes == live.bytes == peak
    finally:
        torch.distributed.destroy_process_group()
    # At the peak, a rank has its own parts of some gradients, or of all.
    assert planned.gathered <= peak <= planned.gathered + planned.gradients
