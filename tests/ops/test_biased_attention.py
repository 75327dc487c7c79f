"""The backward operator of an attention with a bias: PyTorch's rules, every backend, and operations."""

import pytest
import torch
from attention_helpers import exact_rows, packed_kept, spec_of, tensors
from torch.utils.flop_counter import FlopCounterMode

from rmm_linear.ops.attention import ATTENTION_BACKWARD, attention_backward, pack_attention
from rmm_linear.packing.attention_bias import Bias
from rmm_linear.packing.attention_gradients import attention_gradients


def made():
    """What the backward pass is given, and a bias."""
    q, k, v, y = tensors(2, 4, 2, 9, 9, 16, 16, torch.float32)
    spec, stored = spec_of(q, k), pack_attention(q, k, v, None, None, 5, 8, 8, 8)
    bias = torch.randn(1, 4, 9, 9, generator=torch.Generator().manual_seed(1))
    return (q, k, v), bias, (y, stored, None, None, None, None, spec, (8, 8, 8))


@pytest.mark.parametrize("needs_bias", [True, False])
def test_the_operator_obeys_the_rules_of_pytorch(needs_bias):
    _, bias, (y, stored, _, _, *named) = made()
    mask, kept = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril(), packed_kept(torch.rand(2, 4, 9, 9) > 0.3)
    arguments = attention_backward.flatten(y, stored, mask, kept, *named, bias, needs_bias)
    torch.library.opcheck(attention_backward.definition, arguments)


def test_the_gradient_of_the_bias_is_near_the_exact_one():
    """8 bits: an error of 1/177 of an element's size in each of four factors, squared and added, at most."""
    qkv, bias, given = made()
    *found, gradient = attention_backward(*given, bias, True)
    own, spec = Bias(bias, torch.zeros_like(bias)), spec_of(*qkv[:2])
    wanted = attention_gradients(given[0], exact_rows(*qkv), spec, bias=own)
    for one, exact in zip((*found, gradient), (*wanted, own.gradient), strict=True):
        assert 0 < (one - exact).square().sum() < 4 / 177**2 * exact.square().sum()


def test_all_backends_make_the_same():
    """Sums of at most 16 float32 numbers in another order."""
    _, bias, (*given, spec, bits) = made()
    found = []
    for run in (ATTENTION_BACKWARD.plain, ATTENTION_BACKWARD.native):
        own = Bias(bias, torch.zeros_like(bias))
        run(*given, spec=spec, bits=bits, bias=own)
        found.append(own.gradient)
    assert (found[0] - found[1]).abs().max() < 1e-5 * found[0].abs().max()
    assert found[0].abs().max() > 0.1


def test_operations_are_those_without_a_bias():
    _, bias, given = made()
    counts = []
    for call in (lambda: attention_backward(*given), lambda: attention_backward(*given, bias, True)):
        with FlopCounterMode(display=False) as counter:
            call()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
