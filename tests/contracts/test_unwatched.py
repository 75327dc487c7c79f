"""What nothing else sees does less, and makes the same numbers: every operation, in every surrounding that sees it."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from cases import architectures
from helpers import batch_of, loss_of, tiny_model
from module_cases import MEMBERS, converted_model
from module_steps import inputs
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMConfig, convert
from rmm_linear.activations import base
from rmm_linear.layers import linear

STEPS, TOKENS, WIDTH = 4, 60, 72


class Siblings(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 9, bias=False), nn.Linear(WIDTH, 9)

    def forward(self, x):
        return torch.cat((self.a(x), self.b(x), self.a(2 * x)), -1)


OF_TABLE = ["linear countsketch", "Conv1D", "activation gelu", "activation relu", "norm layer", "norm rms", "dropout"]
OF_TABLE += ["gated llama", "attention", "attention dropout", "experts"]
MODULES = {
    **{name: lambda name=name: MEMBERS[name].make(WIDTH) for name in OF_TABLE},
    "siblings": Siblings,
    "in place": lambda: nn.Sequential(nn.Linear(WIDTH, 9), nn.ReLU(inplace=True)),
}


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


@contextmanager
def _profiler():
    with profile(activities=[ProfilerActivity.CPU]):
        yield


SURROUNDINGS = {
    "hooks": lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    "dispatch mode": _Mode,
    "profiler": _profiler,
}


@pytest.fixture
def unwatched(monkeypatch):
    """How often a call was not seen."""
    seen = []
    for module in (linear, base):
        ask = module.is_unwatched
        monkeypatch.setattr(module, "is_unwatched", lambda ask=ask: seen.append(ask()) or seen[-1])
    return seen


def trained(model, loss, surroundings, steps=STEPS):
    """Losses, gradients and random states of some steps; the first is looked at in any case."""
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        with surroundings():
            made = loss(model, step)
            made.backward()
        found += [made.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
        found.append(torch.get_rng_state())
    return found


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


class _Input(nn.Module):
    """Makes the input a parameter, whose gradient is compared as well."""

    def __init__(self, module, dtype, recomputes=False):
        super().__init__()
        self.recomputes = recomputes
        generator = torch.Generator().manual_seed(1)
        self.x = nn.Parameter(torch.randn(2, TOKENS // 2, WIDTH, generator=generator, dtype=dtype))
        self.module = module

    def forward(self, attention_mask=None):
        x = self.x * 1
        return checkpoint(self.module, x, use_reentrant=False) if self.recomputes else self.module(x)


@pytest.mark.pairs
@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fields", [{"bits": 4}, {"bits": None, "ratio": 0.3}, {}], ids=["4 bits", "unpacked", "auto"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", MODULES)
def test_every_module(name, padded, fields, dtype, surrounding, unwatched):
    mask = torch.ones(2, TOKENS // 2, dtype=torch.int64)
    mask[1, 20:] = 0 if padded else 1

    def made():
        torch.manual_seed(0)
        model = _Input(MODULES[name]().to(dtype), dtype)
        convert(model, RMMConfig(kind="countsketch", min_rows=1, **fields))
        return model.train()

    def loss(model, step):
        output = model(attention_mask=mask).float()
        return (output * mask.unsqueeze(-1) * (1 + step + torch.arange(output.shape[-1]))).square().mean()

    expected = trained(made(), loss, SURROUNDINGS[surrounding])
    assert not any(unwatched)
    assert_same(trained(made(), loss, nullcontext), expected)
    assert any(unwatched)


@pytest.mark.parametrize("name", MODULES)
def test_what_is_recomputed(name, unwatched):
    """A recomputation takes the seeds of its forward pass, and so makes the same sketches."""

    def made(recomputes):
        torch.manual_seed(0)
        model = _Input(MODULES[name](), torch.float32, recomputes)
        convert(model, RMMConfig(kind="countsketch", min_rows=1, bits=4, checkpointed="packed"))
        return model.train()

    def loss(model, step):
        output = model()
        return (output * (1 + step + torch.arange(output.shape[-1]))).square().mean()

    expected = trained(made(True), loss, nullcontext)
    assert not any(unwatched)
    assert_same(trained(made(False), loss, nullcontext), expected)
    assert any(unwatched)


@pytest.mark.parametrize("name", MEMBERS)
def test_a_gradient_that_has_no_memory(name):
    """As ``torch.sgn`` has one, whose derivative is a tensor of zeros to which PyTorch gives none."""
    model, x = converted_model(name), inputs()
    output = model(x).sgn()
    gradients = torch.autograd.grad(output, [x, *model.parameters()], torch.ones_like(output))
    assert not any(one.any() for one in gradients)


@architectures
def test_every_architecture(architecture, unwatched):
    def made():
        model = tiny_model(architecture)
        convert(model, RMMConfig(kind="countsketch", min_rows=8, memory=0.2))
        return model.train()

    def loss(model, step):
        return loss_of(model, architecture, batch_of(architecture))

    expected = trained(made(), loss, SURROUNDINGS["hooks"])
    assert not any(unwatched)
    assert_same(trained(made(), loss, nullcontext), expected)
    assert any(unwatched)
