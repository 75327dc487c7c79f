"""Packed norms: how they are called, what else is saved, and one copy for norms that read one tensor."""

import pytest
import torch
from compile_helpers import Graphs
from helpers import packed
from torch import nn

from rmm_linear import RMMConfig, convert
from rmm_linear.activations.norm import PackedNorm
from rmm_linear.context.model_context import ModelContext
from rmm_linear.memory import track_saved

WIDTH = 96


def norm(eps=1e-5, **named):
    return packed(nn.LayerNorm(WIDTH, eps=eps), PackedNorm, **named)


def batch():
    return torch.randn(3, 10, WIDTH).requires_grad_()


def test_the_input_may_be_given_by_its_name():
    module, x = norm(), batch()
    assert torch.equal(module(input=x), module(x))
    with pytest.raises(TypeError):
        module(x, x)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        module(x[..., :5])


def test_an_eps_that_changes_later_is_followed():
    module, exact = norm(), nn.LayerNorm(WIDTH, eps=0.5)
    module.eps = 0.5
    x, y = 0.1 * batch().detach(), batch().detach()
    x.requires_grad_()
    found, expected = (torch.autograd.grad(one(x), x, y)[0] for one in (module, exact))
    assert (found - expected).norm() < 0.1 * expected.norm()  # by another eps, it is seven times too large


def test_a_trained_scale_above_an_input_without_gradient_is_packed():
    norm = nn.LayerNorm(64)
    model = nn.Sequential(norm)
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    convert(model)
    with track_saved(model) as saved:
        output = model.train()(x)
    assert saved.total < 0.4 * x.nbytes
    output.sum().backward()
    assert norm.weight.grad is not None
    norm.weight.requires_grad_(False)
    with track_saved(model) as saved:
        output = model(x)
    del output
    assert saved.total <= x.nbytes + 2 * 4 * len(x)  # with mean and rstd


class Float32RMSNorm(nn.Module):
    """Its output is float32, whatever its input is."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x):
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps))


def test_an_output_of_another_dtype_than_the_input():
    model = nn.Sequential(Float32RMSNorm())
    convert(model, RMMConfig(operations=["norm"], min_rows=1))
    x = torch.randn(20, 64, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        model.train()(x).sum().backward()
    assert x.grad.dtype == torch.float64
    assert model[0].weight.grad.isfinite().all()


class Sum(nn.Module):
    """The sum of norms of one input, and of one norm that reads another tensor."""

    def __init__(self, *norms, other=None):
        super().__init__()
        self.norms, self.other = nn.ModuleList(norms), other

    def forward(self, x):
        total = sum(norm(x) for norm in self.norms)
        return total if self.other is None else total + self.other(x * 2)


def test_norms_that_read_the_same_input_share_one_copy():
    """As in parallel attention blocks; another input, or another eps, has a copy of its own."""
    context = ModelContext([str(number) for number in range(4)])
    norms = [norm(eps, context=context, index=number) for number, eps in enumerate((1e-5, 1e-5, 1e-3, 1e-5))]
    block = Sum(*norms[:3], other=norms[3])
    context.attach(block)
    places = []

    def keep(tensor):
        if tensor.dtype == torch.uint8:
            places.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(batch()).sum().backward()
    assert len(places) == 4
    assert places[0] == places[1]
    assert len(set(places)) == 3
    assert context.sketch_cache.groups == {(0, 1)}


def test_compilers_merge_the_copies_of_norms_that_read_the_same_input():
    first, second, x = norm(), norm(), batch()
    graphs = Graphs()
    compiled = graphs.compile(Sum(first, second))
    compiled(x).sum().backward()
    assert graphs.counts[0]["rmm_linear.pack_norm.default"] == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_rows_of_few_elements_are_exact_and_named(norm):
    """Of 4 elements, dX has 2 directions besides the noise of 4."""
    for width in (4, 5):
        model, x = nn.Sequential(norm(width)).train(), torch.randn(9, width, requires_grad=True)
        y = torch.randn(9, width)
        (expected,) = torch.autograd.grad(model(x), x, y)
        report = convert(model, operations=["norm"])
        (found,) = torch.autograd.grad(model(x), x, y)
        assert torch.equal(found, expected) == (width == 4)
        assert list(report.exact_calls) == (["0"] if width == 4 else [])


class _Shifted(nn.Module):
    """A norm whose scale may begin at 1."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps, self.unit_offset = nn.Parameter(torch.randn(32) / 3), 1e-6, False

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * (1 + self.weight if self.unit_offset else self.weight)


def test_a_setting_that_changes_is_followed():
    model, x, y = nn.Sequential(_Shifted()).train(), torch.randn(256, 32, requires_grad=True), torch.randn(256, 32)
    convert(model, norm_bits=8)
    for offset in (False, True, False):
        model[0].unit_offset = offset
        exact = _Shifted()
        exact.load_state_dict(model[0].state_dict())
        exact.unit_offset = offset
        expected, found = (torch.autograd.grad((one(x) * y).sum(), x)[0] for one in (exact, model))
        assert (found - expected).norm() < 0.05 * expected.norm()  # codes of 8 bits err by a 255th of the largest


class _Counting(_Shifted):
    """Counts its calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_what_a_forward_itself_writes_is_no_setting():
    model = nn.Sequential(_Counting()).train()
    convert(model)
    calls = model[0].calls
    for _ in range(3):
        model(torch.randn(256, 32, requires_grad=True)).sum().backward()
    assert model[0].rmm_norm is not None
    assert model[0].calls == calls + 3
