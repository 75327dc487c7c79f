import functools

import pytest
import torch
from static_memory_helpers import LOOP, MOMENTUM, bytes_of, network
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import AdamW
from transformers import Adafactor

from rmm_linear.fitting.static_memory import StaticMemory, static_memory


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


def test_what_is_there_before_a_step():
    found = StaticMemory(1, 2, 4, 8, 16, 32, 64)
    assert found.before_step == 1 + 2 + 8 + 32 + 64
    assert StaticMemory(**found.to_dict()) == found


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
