"""Packed activations in a model: the token mask, the random numbers of other modules, and checkpoints."""

import pytest
import torch
from pointwise_helpers import packed, randn
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear.context.model_context import ModelContext

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])


class Block(nn.Module):
    """linear, GELU, dropout, linear, for tokens with padding."""

    def __init__(self, reentrant=None):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.up, self.act, self.down = nn.Linear(6, 70), nn.GELU(), nn.Linear(70, 6)
        self.dropout, self.reentrant, self.masked = nn.Dropout(0.3), reentrant, True

    def _inner(self, x):
        return self.down(self.dropout(self.act(self.up(x))))

    def forward(self, x, attention_mask=None):
        out = self._inner(x) if self.reentrant is None else checkpoint(self._inner, x, use_reentrant=self.reentrant)
        return out * attention_mask.unsqueeze(-1) if self.masked else out


def converted(**options):
    model = Block(**options)
    context = ModelContext(["act"])
    packed(model.act, 8, context)
    context.attach(model)
    return model


def run(model):
    model.zero_grad()
    torch.manual_seed(4)
    x = randn(3, 4, 6).requires_grad_()
    output = model(x, attention_mask=MASK)
    output.backward(randn(3, 4, 6, seed=2))
    return output.detach(), x.grad, {name: one.grad.clone() for name, one in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_everything_but_the_rounding_is_that_of_the_exact_model(reentrant):
    """Dropout's numbers too. 8 bits: errors of 1.26 / 255 / √12 = 0.0014 of dY, of gradients of order dY / √70."""
    exact, model = run(Block(reentrant)), run(converted(reentrant=reentrant))
    assert torch.equal(model[0], exact[0])
    assert torch.equal(model[2]["down.weight"], exact[2]["down.weight"])
    for found, wanted in ((model[1], exact[1]), (model[2]["up.weight"], exact[2]["up.weight"])):
        assert not torch.equal(found, wanted)
        assert (found - wanted).norm() < 0.02 * wanted.norm()
    assert not model[1][MASK == 0].any()


def test_only_valid_tokens_are_stored():
    kept, model = [], converted()
    x = randn(3, 4, 6).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x, attention_mask=MASK)
    assert [one.nbytes for one in kept if one.dtype == torch.uint8] == [16 + 496]  # 7 of 12 tokens: 490, aligned


def test_padding_that_reaches_the_loss_is_refused():
    model = converted()
    model.masked = False
    with pytest.raises(RuntimeError, match="masked tokens of act carry a gradient"):
        run(model)


def test_every_step_has_a_seed_of_its_own_that_follows_from_the_generator():
    model = converted()
    first, second = run(model)[1], run(model)[1]
    assert torch.equal(first, second)
    x = randn(3, 4, 6).requires_grad_()
    model.dropout.p, found = 0.0, []
    for _ in range(2):
        x.grad = None
        model(x, attention_mask=MASK).sum().backward()
        found.append(x.grad.clone())
    assert not torch.equal(*found)
