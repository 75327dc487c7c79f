"""Elementwise modules that are found by trying them; their gradients are in tests/contracts/test_modules.py."""

from __future__ import annotations

import pytest
import torch
from helpers import tiny_model, token_ids
from torch import nn

from rmm_linear import convert
from rmm_linear.activations.elementwise import PackedElementwise, is_elementwise

OUTER = nn.Parameter(torch.ones(()))


class By(nn.Module):
    """Applies a function."""

    def __init__(self, function):
        super().__init__()
        self.function, self.calls = function, 0

    def forward(self, x):
        self.calls += 1
        return self.function(self, x)


FOUND = {"sine": lambda self, x: x.sin() * x, "cut": lambda self, x: x.clamp(-1, 1)}
NOT = {
    "saves nothing": lambda self, x: x + 1,
    "same memory": lambda self, x: x,
    "rows": lambda self, x: x.softmax(-1),
    "places": lambda self, x: x * torch.arange(10),
    "random": lambda self, x: x.sin() * torch.rand_like(x),
    "another dtype": lambda self, x: x.sin().double(),
    "another shape": lambda self, x: x.sin()[:2],
    "in place": lambda self, x: x.sin_(),
    "no tensor": lambda self, x: (x.sin(),),
    "its mode": lambda self, x: x.sin() if not self.training else x.sin() + torch.rand_like(x),
    "a parameter of another module": lambda self, x: x.sin() * OUTER,
    "something else": lambda self, x: x @ torch.ones(3, 3),
}


@pytest.mark.parametrize("name", [*FOUND, *NOT])
def test_what_is_elementwise(name):
    module, state = By((FOUND | NOT)[name]).eval(), torch.get_rng_state()
    assert is_elementwise(module) == (name in FOUND)
    assert (module.calls, module.training) == (0, False)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("module", [nn.Identity(), nn.Dropout(), nn.Softmax(-1), nn.Linear(10, 10), nn.PReLU()])
def test_modules_of_pytorch_that_are_not(module):
    assert not is_elementwise(module)


class Capped(nn.Module):
    """A model whose logits go through an elementwise module before its loss."""

    def __init__(self):
        super().__init__()
        self.model, self.cap = tiny_model("llama", dropout=0.0), By(lambda self, x: torch.tanh(x / 3) * 3)

    def get_output_embeddings(self):
        return self.model.get_output_embeddings()

    def forward(self, ids):
        logits = self.cap(self.model(ids).logits)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def test_logits_that_are_lazy_keep_their_gradient():
    model, ids = Capped().train(), token_ids(4, 20)
    exact = model(ids)
    exact.backward()
    wanted = model.model.get_output_embeddings().weight.grad.clone()
    model.zero_grad()
    convert(model, operations=("activation", "logits"))
    assert isinstance(model.cap, PackedElementwise)
    model.get_output_embeddings().rmm_chunk = 7  # fewer than the rows, so that logits are lazy
    loss = model(ids)
    assert torch.allclose(loss, exact, rtol=1e-6)  # of chunks, in another order of sums
    loss.backward()
    found = model.model.get_output_embeddings().weight.grad
    assert float((found - wanted).norm()) < 0.1 * float(wanted.norm())  # of codes of 4 bits
