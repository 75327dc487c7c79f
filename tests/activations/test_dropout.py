"""Packed dropout where it has no rows of columns, drops nothing or everything, or works in place on a view."""

import pytest
import torch
from module_cases import converted_model
from torch import nn

from rmm_linear.activations.dropout import is_dropout


def packed(p=0.3, inplace=False):
    module = converted_model("dropout in place" if inplace else "dropout").module
    module.p = p
    return module


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("shape", [(), (5,), (0, 7), (7, 0), (4, 3, 13)])
def test_any_shape_and_probability(shape, inplace):
    x, y = torch.randn(shape), torch.randn(shape)
    for p in (0.0, 0.3, 1.0):
        results = []
        for module in (packed(p, inplace), nn.Dropout(p, inplace)):
            leaf = x.clone().requires_grad_()
            torch.manual_seed(2)
            output = module(leaf * 1)
            results.append((output.detach(), *torch.autograd.grad(output, leaf, y)))
        assert all(map(torch.equal, *results))


def test_a_view_is_overwritten_as_dropout_does():
    results = []
    for module in (packed(inplace=True), nn.Dropout(0.3, True)):
        x = torch.linspace(-1, 1, 48).view(4, 12).requires_grad_()
        torch.manual_seed(2)
        whole = x * 2
        module(whole.view(8, 6))
        results.append((whole.detach(), *torch.autograd.grad(whole.square().sum(), x)))
    assert all(map(torch.equal, *results))


def test_integers_are_refused_as_by_dropout():
    for module in (packed(), nn.Dropout(0.3)):
        with pytest.raises(RuntimeError, match="can't be cast"):
            module(torch.arange(3))


def test_dropout_itself_is_found_and_nothing_else():
    class Other(nn.Dropout):
        pass

    assert is_dropout(nn.Dropout())
    assert not any(map(is_dropout, (Other(), nn.Dropout1d(), nn.AlphaDropout(), nn.Identity(), packed())))
