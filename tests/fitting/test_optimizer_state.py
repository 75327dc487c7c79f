import functools
import logging
import random

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from bitsandbytes.optim import AdamW8bit
from static_memory_helpers import FOREACH, LOOP, MOMENTUM, bytes_of, network, state_bytes, train
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import Adafactor

from rmm_linear.fitting.static_memory import static_memory
from rmm_linear.memory.peak import LiveTensors, Peak


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
    found = static_memory(model, optimizer).optimizer
    assert found == before + 2 * bytes_of(model[2].parameters()) + 2 * 4


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
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    versions = [parameter._version for parameter in model.parameters()]
    gradients = [parameter.grad for parameter in model.parameters()]
    state = {
        (index, name): value.clone() if isinstance(value, torch.Tensor) else value
        for index, parameter in enumerate(model.parameters())
        for name, value in optimizer.state.get(parameter, {}).items()
    }
    groups = repr(optimizer.param_groups)
    random_state, python_state = torch.get_rng_state(), random.getstate()
    static_memory(model, optimizer)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert random.getstate() == python_state
    assert called == []
    assert all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))
    assert versions == [parameter._version for parameter in model.parameters()]
    assert all(old is new.grad for old, new in zip(gradients, model.parameters(), strict=True))
    assert repr(optimizer.param_groups) == groups
    found = {
        (index, name): value
        for index, parameter in enumerate(model.parameters())
        for name, value in optimizer.state.get(parameter, {}).items()
    }
    assert found.keys() == state.keys()
    assert all(torch.equal(torch.as_tensor(found[key]), torch.as_tensor(state[key])) for key in state)


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
