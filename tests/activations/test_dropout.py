"""Packed dropout is nn.Dropout to the bit, with one bit saved per element."""

import copy
import math
import pickle

import pytest
import torch
from cases import checkpoints
from helpers import bytes_kept
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear.activations.base import SavingCall, packed_class
from rmm_linear.activations.dropout import DropoutFunction, PackedDropout, is_dropout
from rmm_linear.sketches import TokenMask

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(), (5,), (0,), (0, 7), (7, 0), (4, 3, 13), (6, 64)]


def packed(p=0.3, inplace=False):
    module = nn.Dropout(p, inplace)
    module.__class__ = packed_class(PackedDropout, nn.Dropout)
    module._set_up(None)
    return module


def randn(shape, dtype=torch.float32, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def run(module, x, y):
    """Output, gradient, and the state of the generator after a pass with a fixed seed."""
    x = x.detach().requires_grad_()
    torch.manual_seed(2)
    output = module(x * 1 if isinstance(module, nn.Dropout) else x)  # what is written to in place is no leaf
    (gradient,) = torch.autograd.grad(output, x, y)
    return output.detach(), gradient, torch.get_rng_state()


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_output_gradient_and_generator_are_those_of_dropout(shape, dtype, inplace):
    x, y = randn(shape, dtype), randn(shape, dtype, 2)
    for p in (0.0, 0.1, 0.3, 1.0):
        assert_same(run(packed(p, inplace), x, y), run(nn.Dropout(p, inplace), x, y))


@pytest.mark.parametrize("view", [lambda x: x.T, lambda x: x[:, 3:50], lambda x: x[::2], lambda x: x[0].expand(5, 64)])
@pytest.mark.parametrize("inplace", [False, True])
def test_strides_do_not_matter(view, inplace):
    x = view(randn((64, 64)))
    y = randn(x.shape, seed=2)
    assert_same(run(packed(inplace=inplace), x, y), run(nn.Dropout(0.3, inplace), x, y))


def test_a_view_is_overwritten_as_dropout_does():
    results = []
    for module in (packed(inplace=True), nn.Dropout(0.3, True)):
        x = randn((4, 12)).requires_grad_()
        torch.manual_seed(2)
        whole = x * 2
        module(whole.view(8, 6))
        results.append((whole.detach(), *torch.autograd.grad(whole.square().sum(), x)))
    assert_same(*results)


@pytest.mark.parametrize("inplace", [False, True])
def test_without_gradients_it_is_dropout(inplace):
    x = randn((4, 13))
    for train, grad, needed in ((False, True, True), (True, False, True), (True, True, False)):
        results = []
        for module in (packed(inplace=inplace), nn.Dropout(0.3, inplace)):
            torch.manual_seed(2)
            with torch.set_grad_enabled(grad):
                output = module.train(train)((x * 1).requires_grad_(needed) if not inplace else x * 1)
            results.append((output.detach(), torch.get_rng_state()))
            assert bytes_kept(module.train(train), x * 1) == 0
        assert_same(*results)


def test_integers_are_refused_as_by_dropout():
    for module in (packed(), nn.Dropout(0.3)):
        with pytest.raises(RuntimeError, match="can't be cast"):
            module(torch.arange(3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 3, 13), (6, 64), (5,)])
@pytest.mark.parametrize("inplace", [False, True])
def test_bytes_are_the_formula(shape, dtype, inplace):
    x = randn(shape, dtype).requires_grad_()
    scaled = x * 1
    assert bytes_kept(packed(inplace=inplace), scaled) == math.prod(shape[:-1]) * math.ceil(shape[-1] / 8)


def test_padding_is_not_stored_and_has_no_gradient():
    valid = torch.tensor([1, 1, 0, 1, 0], dtype=torch.bool)
    mask, seen = TokenMask.of(valid), []
    call = SavingCall(None, mask, lambda y, given: seen.append((y.clone(), given)))
    x, y = randn((5, 13)).requires_grad_(), randn((5, 13), seed=2)

    class Module(nn.Module):
        def forward(self, x):
            return DropoutFunction.apply(x, 0.3, False, call)

    index_bytes = mask.index.nbytes
    # order is longer than index, which is a view of it
    assert bytes_kept(Module(), x) == 3 * 2 + mask.order.nbytes >= 3 * 2 + index_bytes
    torch.manual_seed(2)
    (gradient,) = torch.autograd.grad(Module()(x), x, y)
    expected = run(nn.Dropout(0.3), x, y)[1]
    assert torch.equal(gradient[valid], expected[valid])
    assert not gradient[~valid].any()
    assert torch.equal(seen[0][0], y)
    assert seen[0][1] is mask


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.first, self.dropout = nn.Linear(6, 13), dropout

    def forward(self, x):
        return self.dropout(self.first(x).tanh())


@checkpoints
def test_checkpoints_repeat_the_mask(reentrant):
    results = []
    for dropout, use in ((packed(), reentrant), (nn.Dropout(0.3), reentrant), (packed(), None)):
        torch.manual_seed(0)
        block, x = Block(dropout), randn((5, 6)).requires_grad_()
        torch.manual_seed(2)
        output = block(x) if use is None else checkpoint(block, x, use_reentrant=use)
        output.square().sum().backward()
        results.append((output.detach(), x.grad, block.first.weight.grad, torch.get_rng_state()))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_it_compiles_without_a_break_for_any_length():
    modules = packed(), nn.Dropout(0.3)
    compiled = [torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True) for module in modules]
    for length in (5, 9):
        x, y = randn((length, 13)), randn((length, 13), seed=2)
        found, expected = (run(module, x, y) for module in compiled)
        assert_same(found, expected)
        assert not torch.equal(compiled[0](x.requires_grad_()), compiled[0](x))


def test_copies_and_pickles_are_packed():
    module, x, y = packed(), randn((5, 13)), randn((5, 13), seed=2)
    expected = run(nn.Dropout(0.3), x, y)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), copy.copy(module)):
        assert type(copied) is type(module)
        assert_same(run(copied, x, y), expected)
        assert bytes_kept(copied, x.detach().requires_grad_()) == 10


def test_double_backward_is_refused():
    x = randn((5, 13)).requires_grad_()
    with pytest.raises(RuntimeError, match=r"packed nn.Dropout does not support double backward"):
        torch.autograd.grad(packed()(x).sum(), x, create_graph=True)


def test_dropout_itself_is_found_and_nothing_else():
    class Other(nn.Dropout):
        pass

    assert is_dropout(nn.Dropout())
    assert not any(map(is_dropout, (Other(), nn.Dropout1d(), nn.AlphaDropout(), nn.Identity(), packed())))
