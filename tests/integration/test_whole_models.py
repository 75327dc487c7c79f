"""All operations in models that work in place, use a module twice, or are run backward twice."""

import pytest
import torch
from cases import WHOLE
from helpers import gradients
from statistical import assert_unbiased
from torch import nn

from rmm_linear import convert


class InPlace(nn.Module):
    """Activation and dropout that overwrite their input, and additions to what they returned."""

    def __init__(self, activation):
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(16), nn.Linear(16, 32), activation(inplace=True)
        self.dropout, self.down = nn.Dropout(0.3, inplace=True), nn.Linear(32, 16)

    def forward(self, x):
        x = self.norm(x)
        hidden = self.dropout(self.down(self.act(self.up(x))))
        hidden += x
        return hidden


class Twice(nn.Module):
    """One norm, one activation and one dropout at two places, with inputs of two lengths."""

    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.act, self.dropout = nn.GELU(), nn.Dropout(0.3)

    def forward(self, x):
        hidden = self.dropout(self.act(self.first(self.norm(x))))
        hidden = self.second(hidden)[:, ::2]
        return self.act(self.dropout(self.norm(hidden))) + hidden


class Residual(nn.Module):
    """What a stand-in replaced is overwritten before the backward pass: inputs of norm, activation and linear."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.act, self.second = nn.Linear(16, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 16)

    def forward(self, x):
        hidden = self.first(x)
        hidden += self.norm(hidden)
        hidden += self.act(hidden)
        hidden += self.second(hidden)
        return hidden


MODELS = {
    "in-place ReLU": lambda: InPlace(nn.ReLU),
    "in-place SiLU": lambda: InPlace(nn.SiLU),
    "in-place Mish": lambda: InPlace(nn.Mish),
    "twice": Twice,
}
PACKED = {"norm", "activation", "dropout"}


def fresh(name):
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return MODELS[name]().train()


def data():
    return torch.randn(4, 20, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()


def step(model, passes=1):
    """Output and gradients, summed over backward passes through one graph."""
    model.zero_grad()
    x = data()
    torch.manual_seed(5)
    output = model(x)
    for number in range(passes):
        output.square().sum().backward(retain_graph=number < passes - 1)
    return output.detach(), {**gradients(model), "x": x.grad}


def assert_steps_are_unbiased(model, report, output, exact):
    def draw(number):
        report.context.salt = number
        found, gradient = step(model)
        assert torch.equal(found, output)
        return gradient

    assert_unbiased(draw, exact, draws=25, widest=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_exact_and_gradients_unbiased(name):
    output, exact = step(fresh(name))
    model = fresh(name)
    report = convert(model, **WHOLE)
    assert {entry.operation for entry in report.packed.values()} == PACKED
    assert_steps_are_unbiased(model, report, output, exact)


@pytest.mark.parametrize("name", ["in-place ReLU", "twice"])
def test_a_second_backward_pass_reads_the_same_stand_ins(name):
    """So two passes through one graph give twice the gradient of one, to the bit."""
    model = fresh(name)
    report = convert(model, **WHOLE)
    report.context.salt = 1
    once, twice = (step(model, passes)[1] for passes in (1, 2))
    for key, gradient in once.items():
        assert torch.equal(twice[key], 2 * gradient), key


def test_what_was_replaced_may_be_overwritten():
    """The exact model cannot be run backward: it needs what was overwritten. The stand-ins were made before."""
    torch.manual_seed(2)
    model = Residual().train()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model)

    def apart(x):
        hidden = model.first(x)
        hidden = hidden + model.norm(hidden)
        hidden = hidden + model.act(hidden)
        return hidden + model.second(hidden)

    x = data()
    output = apart(x)
    output.square().sum().backward()
    exact = {**gradients(model), "x": x.grad}
    report = convert(model, **WHOLE)

    assert_steps_are_unbiased(model, report, output, exact)


def test_microbatches_accumulate():
    """The sum over four of them is unbiased for the sum of the exact gradients."""

    def accumulated(model):
        model.zero_grad()
        for number, part in enumerate(data().detach().split(1)):
            torch.manual_seed(number)
            model(part).square().sum().backward()
        return gradients(model)

    exact, model = accumulated(fresh("twice")), fresh("twice")
    report = convert(model, **{**WHOLE, "min_rows": 4})

    def draw(number):
        report.context.salt = number
        return accumulated(model)

    assert_unbiased(draw, exact, draws=25, widest=0.05)
