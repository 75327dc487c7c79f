"""All operations in models that use modules twice, over microbatches, and overwrite what was compressed."""

import pytest
import torch
from cases import WHOLE
from helpers import gradients
from statistical import assert_unbiased
from torch import nn

from rmm_linear import convert


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


def test_gradients_are_unbiased_in_one_pass_and_over_microbatches():
    """Outputs are the exact model's; sums over four microbatches are unbiased for the sum of the exact gradients."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Twice().train()
    data = torch.randn(4, 20, 16, generator=torch.Generator().manual_seed(1))

    def accumulated(parts):
        model.zero_grad()
        outputs = []
        for number, part in enumerate(data.split(len(data) // parts)):
            torch.manual_seed(number)
            outputs.append(model(part))
            outputs[-1].square().sum().backward()
        return torch.cat(outputs).detach(), gradients(model)

    exact = {parts: accumulated(parts) for parts in (1, 4)}
    report = convert(model, **{**WHOLE, "min_rows": 4})
    assert {entry.operation for entry in report.packed.values()} == {"norm", "activation", "dropout"}
    for parts, (output, wanted) in exact.items():

        def draw(number, parts=parts, output=output):
            report.context.salt = number
            found, gradient = accumulated(parts)
            assert torch.equal(found, output)
            return gradient

        assert_unbiased(draw, wanted, draws=25, widest=0.05)


class Residual(nn.Module):
    """Overwrites inputs of norm, activation and linear before the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.act, self.second = nn.Linear(16, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 16)

    def forward(self, x, in_place=True):
        hidden = self.first(x)
        for part in (self.norm, self.act, self.second):
            hidden = hidden.add_(part(hidden)) if in_place else hidden + part(hidden)
        return hidden


def test_what_was_compressed_may_be_overwritten():
    """The exact model cannot be run backward: it needs what was overwritten."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Residual().train()
    x = torch.randn(4, 20, 16, generator=torch.Generator().manual_seed(1))

    def step(in_place=True):
        model.zero_grad()
        output = model(x, in_place)
        output.square().sum().backward()
        return output.detach(), gradients(model)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step()
    output, exact = step(in_place=False)
    report = convert(model, **{**WHOLE, "min_rows": 4})

    def draw(number):
        report.context.salt = number
        found, gradient = step()
        assert torch.equal(found, output)
        return gradient

    assert_unbiased(draw, exact, draws=25, widest=0.05)
