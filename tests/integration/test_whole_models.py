"""All operations in a model that uses its modules twice, and over microbatches."""

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
