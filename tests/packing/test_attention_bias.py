"""A bias of the scores: all gradients are those of autograd, the bias's own too, whatever it is broadcast along."""

import pytest
import torch
from attention_helpers import exact_rows, formula, packed_kept, spec_of, tensors

from rmm_linear.packing.attention_gradients import Bias, attention_gradients, biased

ROUNDING = 1e-12  # sums of at most 250 float64 products of numbers below 10, in another order
SHAPES = [(1, 1), (1, 4), (3, 1), (3, 4)]


def randn(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MASKS = {
    "none": None,
    "bool": randn(3, 1, 9, 9) > -0.3,
    "bool of heads": randn(1, 4, 9, 9) > -0.3,
    "some queries see nothing": (randn(3, 1, 9, 9) > -0.3) & (torch.arange(9) != 4).view(1, 1, 9, 1),
    "additive": randn(3, 1, 9, 9),
}


def wanted(q, k, v, y, spec, bias, mask, kept):
    """The gradients by autograd of transformers' bias and mask in one, −∞ where a causal query does not see."""
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v, bias)]
    added = biased(mask, inputs[3], bias.dtype)
    output = formula(*inputs[:3], spec, added, kept)
    *found, grad_bias = torch.autograd.grad(output, inputs, y.transpose(1, 2))
    return [*(one.transpose(1, 2) for one in found), grad_bias]


def check(found, expected):
    for one, exact in zip(found, expected, strict=True):
        assert one.shape == exact.shape
        assert (one - exact).abs().max() < ROUNDING
        assert exact.abs().max() > 0.1


@pytest.mark.parametrize("block", [None, 1, 40, 300])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_autograd(shape, name, dropout, block):
    q, k, v, y = tensors(3, 4, 2, 9, 9, 8, 6)
    spec, bias = spec_of(q, k, p=dropout), randn(*shape, 9, 9, seed=4)
    kept = randn(3, 4, 9, 9, seed=5) > -0.5 if dropout else None
    own = Bias(bias, torch.zeros_like(bias))
    bits = None if kept is None else packed_kept(kept)
    found = attention_gradients(y, exact_rows(q, k, v), spec, MASKS[name], bits, bias=own, block=block)
    check([*found, own.gradient], wanted(q, k, v, y, spec, bias, MASKS[name], kept))


@pytest.mark.parametrize("block", [None, 700])
@pytest.mark.parametrize("shape", SHAPES)
def test_causal_attention_with_a_bias(shape, block):
    """The formula of the helpers takes a causal mask or another one, so the bias is given with what hides keys."""
    q, k, v, y = tensors(3, 4, 2, 150, 150, 4, 4)
    bias = randn(*shape, 150, 150, seed=4)
    own = Bias(bias, torch.zeros_like(bias))
    found = attention_gradients(y, exact_rows(q, k, v), spec_of(q, k, is_causal=True), bias=own, block=block)
    visible = torch.ones(1, 1, 150, 150, dtype=torch.bool).tril()
    check([*found, own.gradient], wanted(q, k, v, y, spec_of(q, k), bias, visible, None))


@pytest.mark.parametrize("shape", SHAPES)
def test_what_padding_leaves_out_changes_no_gradient(shape):
    valid = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0, 0], [0] * 9, [0, 0, 0, 1, 1, 1, 1, 0, 1]]).bool()
    q, k, v, y = tensors(3, 4, 2, 9, 9, 8, 6)
    y, mask, bias = y * valid.view(3, 9, 1, 1), valid.view(3, 1, 1, 9).expand(3, 1, 9, 9), randn(*shape, 9, 9)
    index = valid.flatten().nonzero().squeeze(1)
    own = Bias(bias, torch.zeros_like(bias))
    rows = exact_rows(q, k, v, index, index)
    found = attention_gradients(y, rows, spec_of(q, k), mask, None, index, index, bias=own)
    check([*found, own.gradient], wanted(q, k, v, y, spec_of(q, k), bias, mask, None))


def test_a_bias_without_a_gradient_is_only_added():
    q, k, v, y = tensors(3, 4, 2, 9, 9, 8, 6)
    bias = randn(1, 4, 9, 9)
    found = attention_gradients(y, exact_rows(q, k, v), spec_of(q, k), bias=Bias(bias))
    check(found, wanted(q, k, v, y, spec_of(q, k), bias, None, None)[:3])
