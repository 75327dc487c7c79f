"""Threads that train one converted model at once, each with its own batches and masks."""

import threading

import pytest
import torch
from own_modules import OwnGate
from torch import nn

from rmm_linear import RMMConfig, convert

STEPS, SHAPE, WIDTH = 4, (3, 10), 16


class Meeting(nn.Module):
    """Layers between which all threads wait for each other."""

    def __init__(self, barrier):
        super().__init__()
        self.first, self.act, self.second, self.norm = (
            nn.Linear(WIDTH, 32),
            nn.GELU(),
            nn.Linear(32, 9),
            nn.LayerNorm(9),
        )
        self.barrier = barrier

    def forward(self, x, attention_mask=None):
        hidden = self.first(x)
        if self.barrier is not None:
            self.barrier.wait(20)
        return self.norm(self.second(self.act(hidden)))


class Regions(nn.Module):
    """Attention with code and a parameter of its own, and elementwise code between linear layers."""

    def __init__(self, barrier):
        super().__init__()
        self.barrier = barrier
        self.attention, self.gate = Attending(), OwnGate(WIDTH)

    def forward(self, x, attention_mask=None):
        hidden = self.attention(x)
        if self.barrier is not None:
            self.barrier.wait(20)
        return self.gate(hidden)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        scores = (self.q(x) * self.scale) @ self.k(x).transpose(1, 2)
        return self.o(torch.softmax(torch.tanh(scores / 4) * 4, -1) @ self.v(x))


def batches(thread):
    """Inputs and masks; the first thread has no padding."""
    generator = torch.Generator().manual_seed(thread)
    mask = torch.ones(SHAPE, dtype=torch.int64)
    mask[1, 5 * thread or 10 :] = 0
    return [(torch.randn(*SHAPE, WIDTH, generator=generator), mask) for _ in range(STEPS)]


def gradients(model, x, mask, parameters=None):
    """parameters: The model's, while other threads may have others in their place for a while."""
    output = model(x, attention_mask=mask) * mask.unsqueeze(-1)
    return torch.autograd.grad(output.sin().sum(), parameters or list(model.parameters()))


@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("kind", [Meeting, Regions])
def test_each_has_its_own_masks(kind, trained):
    """Whether or not the first steps have checked them, which run alone; and its own calls of layers."""
    torch.manual_seed(0)
    exact = kind(None)
    model = kind(None)
    model.load_state_dict(exact.state_dict())
    codes = {"bits": 8, "activation_bits": 8, "norm_bits": 8, "attention_bits": 8}
    convert(model, RMMConfig(min_rows=1, mask_padding=kind is Meeting, **codes))
    for x, mask in batches(1)[:trained]:
        gradients(model, x, mask)
    model.barrier, found, parameters = threading.Barrier(2), {}, list(model.parameters())

    def train(thread):
        try:
            found[thread] = [gradients(model, *batch, parameters) for batch in batches(thread)]
        except BaseException as error:
            found[thread] = error
            model.barrier.abort()

    threads = [threading.Thread(target=train, args=(thread,)) for thread in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for thread, steps in found.items():
        assert isinstance(steps, list), steps
        for step, batch in zip(steps, batches(thread), strict=True):
            for one, other in zip(step, gradients(exact, *batch), strict=True):
                assert (one - other).norm() < 0.05 * other.norm() + 1e-4
