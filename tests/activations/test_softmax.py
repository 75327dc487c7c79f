"""Softmax that saves its probabilities in few bits: unbiased from one code, exact where that frees nothing."""

import math

import pytest
import torch
from cases import light_and_heavy
from helpers import bytes_kept
from module_cases import aligned
from statistical import Z, z_scores
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMConfig, convert
from rmm_linear.activations.softmax import PackedSoftmax
from rmm_linear.memory import track_saved
from rmm_linear.ops.softmax import pack_softmax, softmax_backward


def scores(rows, columns, spread):
    """Of queries that see some of the keys alone, as behind a causal mask."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)) * spread
    hidden = torch.arange(columns) > (torch.arange(rows)[:, None] + 1) * columns // rows
    return x.masked_fill(hidden, -torch.inf)


@light_and_heavy(100, 5_000)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("columns", "spread"), [(6, 1.0), (100, 4.0)])
def test_one_copy_gives_unbiased_gradients(columns, spread, bits, draws):
    """In every direction, and in that of ∑ p² y, in which p̂ ⟨p̂, y⟩ would be biased were its variance left in."""
    p = scores(24, columns, spread).softmax(1)
    y = torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) + 2 * p
    exact = (p * (y - (p * y).sum(1, keepdim=True))).double()
    found = torch.stack([
        softmax_backward(y, pack_softmax(p, bits, seed), bits, torch.float32).double() for seed in range(draws)
    ])  # fmt: skip
    errors = found - exact
    for direction in (exact, y.double()):
        assert abs(float(z_scores((errors * direction).flatten(1).sum(1)))) < Z
    assert draws * float(errors.mean(0).square().sum() / errors.var(0).sum()) < Z**2
    assert 0 < float(errors.square().flatten(1).sum(1).mean().sqrt()) < (0.4, 0.03)[bits == 8] * float(exact.norm())


class Attends(nn.Module):
    """Attention by code of its own that has no linear layers: a product of the probabilities is behind softmax."""

    def __init__(self, keeps=True):
        super().__init__()
        self.softmax, self.keeps = nn.Softmax(-1), keeps

    def forward(self, x):
        p = self.softmax(x @ x.mT / math.sqrt(x.shape[-1]))
        return p @ x if self.keeps else p.sum(-1) + p[..., 0]


@pytest.mark.parametrize("keeps", [True, False])
def test_where_a_product_keeps_the_probabilities_it_is_exact_from_the_second_step_on(keeps):
    model, x = Attends(keeps).train(), torch.randn(2, 40, 16, requires_grad=True)
    exact = bytes_kept(model, x)
    report = convert(model, operations=["attention"])
    assert isinstance(model.softmax, PackedSoftmax)
    assert report.packed["softmax"].saved == "its probabilities, 4 bits"
    for _ in range(2):
        model(x * 1).square().sum().backward()
    assert report.kept_anyway == (["softmax"] if keeps else [])
    assert (bytes_kept(model, x) == exact) == keeps


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_over_any_dimension(dim):
    model, x = nn.Sequential(nn.Softmax(dim)).train(), torch.randn(12, 30, 70, requires_grad=True)
    y = torch.randn(x.shape)
    (expected,) = torch.autograd.grad(model(x), x, y)
    convert(model, RMMConfig(operations=["attention"], attention_bits=8))
    output = model(x)
    assert torch.equal(output, x.softmax(dim))
    (found,) = torch.autograd.grad(output, x, y)
    assert 0 < float((found - expected).norm()) < 0.02 * float(expected.norm())


def test_what_stays_as_it_is():
    """A dimension that nobody has said, and subclasses with code of their own."""

    class Own(nn.Softmax):
        def forward(self, input):
            return super().forward(2 * input)

    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(), Own(-1))
    assert convert(model, operations=["attention", "linear"]).packed == {}


class Weighs(nn.Module):
    """Attention by products and a softmax of its own code, or that of a module in it, without linear layers."""

    def __init__(self, how):
        super().__init__()
        self.softmax, self.weights, self.how = nn.Softmax(-1), nn.Parameter(torch.ones(3)), how

    def forward(self, x):
        q, k, v = (x.sin() * one for one in self.weights)
        s = torch.bmm(q, k.transpose(1, 2))
        p = F.softmax(s, dim=-1) if self.how == "function" else s.softmax(-1) if self.how == "method" else None
        p = torch.softmax(s, -1, s.dtype) * s.softmax(-1, s.dtype).detach() if self.how == "dtype" else p
        return torch.bmm(self.softmax(s) if p is None else p, v)


@pytest.mark.parametrize("how", ["function", "method", "module"])
def test_calls_in_a_modules_own_code_share_one_code_with_the_product(how):
    model = nn.Sequential(Weighs(how)).train()
    x, y = torch.randn(4, 128, 32), torch.randn(4, 128, 32)
    (expected,) = torch.autograd.grad(model(x), [*model.parameters()], y)
    report = convert(model, operations=["attention", "linear"])
    found = []
    for _ in range(60):
        (gradient,) = torch.autograd.grad(model(x), [*model.parameters()], y)
        found.append(gradient)
    assert report.kept_anyway == []
    assert (z_scores(torch.stack(found) - expected).abs() < Z).all()
    with track_saved(model) as kept:
        output = model(x)
    assert output is not None
    sizes = [one.bytes for one in kept.storages.values()]
    assert sizes.count(aligned(8, 4 * 128 * 128 // 2, 4 * 128 * 2)) == 1
    assert 4 * 4 * 128 * 128 not in sizes


def test_in_a_checkpoint_that_packs_one_pass_decodes_what_the_other_has_saved():
    class Repeats(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    model = Repeats(Weighs("function")).train()
    x, y = torch.randn(4, 128, 32), torch.randn(4, 128, 32)
    (expected,) = torch.autograd.grad(model(x), [*model.parameters()], y)
    convert(model, operations=["attention", "linear"], checkpointed="packed")
    found = [torch.autograd.grad(model(x), [*model.parameters()], y)[0] for _ in range(30)]
    assert (z_scores(torch.stack(found) - expected).abs() < Z).all()


def test_a_dtype_by_place():
    model, x = nn.Sequential(Weighs("dtype")).train(), torch.randn(4, 128, 32)
    exact = model(x)
    convert(model, operations=["attention", "linear"])
    assert torch.equal(model(x), exact)
