"""Attention with nothing packed: the blocks of scores make the gradients of the formula, whatever is left out."""

import dataclasses

import pytest
import torch
from attention_helpers import exact_rows, formula, packed_kept, spec_of, tensors
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear.packing import attention
from rmm_linear.packing.attention import (
    attention_rows,
    check_attention_bits,
    dropped_attention,
    hides_padding,
)
from rmm_linear.packing.attention_gradients import Bias, attention_gradients, biased

# Sums of at most 150 float64 products of numbers below 10, in another order: each is off by 1e-13 at most.
ROUNDING = 1e-12
VALID = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0, 0], [0] * 9, [0, 0, 0, 1, 1, 1, 1, 0, 1]]).bool()
RIGHT = torch.arange(9) < torch.tensor([[9], [3], [6]])
HEADS = [(4, 4), (4, 2), (4, 1), (1, 1)]


def rand(*shape, seed=1):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


MASKS = {
    "none": None,
    "bool": rand(3, 1, 9, 9) > 0.4,
    "bool of heads": rand(1, 4, 9, 9) > 0.4,
    "some queries see nothing": (rand(3, 1, 9, 9) > 0.4) & (torch.arange(9) != 4).view(1, 1, 9, 1),
    "additive": torch.randn(3, 1, 9, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64),
    "lowest number": torch.zeros(3, 1, 9, 9, dtype=torch.float64).masked_fill_(
        rand(3, 1, 9, 9) > 0.6, torch.finfo(torch.float64).min
    ),
    "window": ((torch.arange(9).view(9, 1) - torch.arange(9)) % 9 < 3).view(1, 1, 9, 9),
}


BIASES = [(1, 1), (1, 4), (3, 1), (3, 4)]  # sequences and heads of a bias, which may be broadcast along both


def bias_of(shape, tokens=9):
    generator = torch.Generator().manual_seed(4)
    return torch.randn(*shape, tokens, tokens, generator=generator, dtype=torch.float64)


def gradients(q, k, v, y, spec, mask=None, kept=None, index=None, kv_index=None, bias=None, block=None):
    """Of q, k and v, and of a bias."""
    own = None if bias is None else Bias(bias, torch.zeros_like(bias))
    bits = None if kept is None else packed_kept(kept, index)
    rows = exact_rows(q, k, v, index, kv_index)
    found = attention_gradients(y, rows, spec, mask, bits, index, kv_index, bias=own, block=block)
    return [*found, *([] if own is None else [own.gradient])]


def check(found, q, k, v, y, spec, mask=None, kept=None, bias=None):
    """By autograd; transformers adds bias and mask in one, −∞ where a causal query does not see."""
    inputs = [one.detach().requires_grad_() for one in (q, k, v, *([] if bias is None else [bias]))]
    if bias is not None:
        if spec.is_causal:
            mask = torch.ones(1, 1, *bias.shape[-2:], dtype=torch.bool).tril()
        spec, mask = dataclasses.replace(spec, is_causal=False), biased(mask, inputs[3], bias.dtype)
    exact = torch.autograd.grad(formula(*inputs[:3], spec, mask, kept), inputs, y.transpose(1, 2))
    for one, wanted in zip(found, (*(one.transpose(1, 2) for one in exact[:3]), *exact[3:]), strict=True):
        assert one.shape == wanted.shape
        assert (one - wanted).abs().max() < ROUNDING
        assert wanted.abs().max() > 0.1 or not y.any()


@pytest.mark.pairs
@pytest.mark.parametrize("shape", [None, *BIASES])
@pytest.mark.parametrize("block", [None, 1, 40, 300])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", MASKS)
def test_gradients_are_those_of_the_formula(name, dropout, block, shape):
    q, k, v, y = tensors(3, 4, 2, 9, 9, 8, 6)
    spec, bias = spec_of(q, k, p=dropout), None if shape is None else bias_of(shape)
    kept = rand(3, 4, 9, 9) > dropout if dropout else None
    found = gradients(q, k, v, y, spec, MASKS[name], kept, bias=bias, block=block)
    check(found, q, k, v, y, spec, MASKS[name], kept, bias)


def test_a_bias_without_a_gradient_is_only_added():
    q, k, v, y = tensors(3, 4, 2, 9, 9, 8, 6)
    spec, bias = spec_of(q, k), bias_of((1, 4))
    found = attention_gradients(y, exact_rows(q, k, v), spec, bias=Bias(bias))
    expected = gradients(q, k, v, y, spec, bias=bias)[:3]
    assert all((one - other).abs().max() < ROUNDING for one, other in zip(found, expected, strict=True))


@pytest.mark.pairs
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (5, 9), (9, 5), (150, 150)])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block", [None, 700])
def test_grouped_queries_and_causal_attention(block, causal, heads, kv_heads, queries, keys):
    q, k, v, y = tensors(2, heads, kv_heads, queries, keys, 4, 4)
    spec = spec_of(q, k, is_causal=causal, scale=0.7)
    check(gradients(q, k, v, y, spec, block=block), q, k, v, y, spec)
    if queries == keys:
        bias = bias_of((1, heads), keys)
        check(gradients(q, k, v, y, spec, bias=bias, block=block), q, k, v, y, spec, bias=bias)


@pytest.mark.pairs
@pytest.mark.parametrize("block", [None, 1, 300])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("case", ["keys hidden", "keys seen", "causal"])
@pytest.mark.parametrize("shape", [None, (3, 4)])
def test_what_padding_leaves_out_changes_no_gradient(case, dropout, block, shape):
    """Queries of padding have no gradient, and their keys leave only where nothing sees them."""
    valid = RIGHT if case == "causal" else VALID
    q, k, v, y = tensors(3, 4, 2, 9, 9, 8, 6)
    y = y * valid.view(3, 9, 1, 1)
    mask = (valid.view(3, 1, 1, 9) & (rand(9, 9) > 0.2)) if case == "keys hidden" else None
    spec, bias = spec_of(q, k, is_causal=case == "causal", p=dropout), None if shape is None else bias_of(shape)
    hidden = bool(hides_padding(valid, mask, spec.is_causal))
    assert hidden == (case != "keys seen")
    index = valid.flatten().nonzero().squeeze(1)
    kv_index = index if hidden else None
    kept = rand(3, 4, 9, 9) > dropout if dropout else None
    rows = attention_rows(q, k, v, index, kv_index)
    assert [len(part) for part in rows] == [len(index), *[len(index) if hidden else 27] * 2]
    found = gradients(q, k, v, y, spec, mask, kept, index, kv_index, bias, block)
    check(found, q, k, v, y, spec, mask, kept, bias)


@pytest.mark.parametrize(
    ("valid", "mask", "causal", "hides"),
    [
        (VALID, VALID.view(3, 1, 1, 9).expand(3, 1, 9, 9), False, True),
        (VALID, torch.where(VALID.view(3, 1, 1, 9), 0.0, torch.finfo(torch.float32).min), False, True),
        (VALID, torch.where(VALID.view(3, 1, 1, 9), 0.0, -1.0), False, False),
        # Queries of padding may see padding, as those of transformers' masks that see everything do.
        (VALID, (VALID.view(3, 1, 1, 9) | ~VALID.view(3, 1, 9, 1)), False, True),
        (VALID, torch.ones(1, 1, 9, 9, dtype=torch.bool), False, False),
        (VALID, None, False, False),
        (RIGHT, None, True, True),
        (VALID, None, True, False),
        (torch.ones(2, 4, dtype=torch.bool), None, False, True),
        # One head of several sees a padded key.
        (RIGHT, (RIGHT.view(3, 1, 1, 9) | (torch.arange(4) == 2).view(1, 4, 1, 1)).expand(3, 4, 9, 9), False, False),
    ],
)
def test_padding_is_hidden_if_no_valid_query_sees_its_key(valid, mask, causal, hides):
    assert bool(hides_padding(valid, mask, causal)) is hides


def test_keys_are_packed_less_their_mean():
    q, k, v, _ = tensors(2, 4, 2, 5, 7, 8, 6)
    rows, keys, values = attention_rows(q, k, v)
    assert torch.equal(rows[6].view(4, 8), q[1, :, 1])
    assert torch.equal(values[9].view(2, 6), v[1, :, 2])
    assert keys.view(2, 7, 16).mean(1).abs().max() < ROUNDING
    assert (keys[9].view(2, 8) - (k[1, :, 2] - k[1].mean(1))).abs().max() < ROUNDING


@pytest.mark.pairs
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("heads", [1, 3, 4, 8, 100], ids="{} heads at a time".format)  # of 4 a sequence, of 3 sequences
def test_dropout_with_a_known_mask(name, kv_heads, heads, monkeypatch):
    monkeypatch.setattr(attention, "block_size", lambda device: heads * 9 * 9)
    q, k, v, _ = tensors(3, 4, kv_heads, 9, 9, 8, 6)
    spec, kept = spec_of(q, k, p=0.3), rand(3, 4, 9, 9) > 0.3
    found = dropped_attention(q, k, v, MASKS[name], kept, spec).transpose(1, 2)
    assert (found - formula(q, k, v, spec, MASKS[name], kept)).abs().max() < ROUNDING


@pytest.mark.parametrize("causal", [True, False])
def test_dropout_is_that_of_pytorch_for_the_same_random_numbers(causal):
    """Up to the order of sums of 9 float32 products."""
    q, k, v, _ = tensors(3, 4, 4, 9, 9, 8, 6, torch.float32)
    torch.manual_seed(3)
    kept = torch.empty(3, 4, 9, 9, dtype=torch.bool).bernoulli_(0.7)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    exact = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=causal)
    assert torch.equal(torch.get_rng_state(), state)
    found = dropped_attention(q, k, v, None, kept, spec_of(q, k, p=0.3, is_causal=causal)).transpose(1, 2)
    assert (found - exact).abs().max() < 9 * torch.finfo(torch.float32).eps * exact.abs().max()


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().nbytes() == made.nbytes:
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_no_more_scores_are_made_at_a_time_than_a_block(kv_heads, causal):
    q, k, v, y = tensors(2, 4, kv_heads, 256, 256, 4, 4)
    rows, block = exact_rows(q, k, v), 1 << 14
    with Largest() as largest:
        attention_gradients(y, rows, spec_of(q, k, is_causal=causal), block=block)
    assert largest.elements == block  # one head has 4 times, all of them 32 times as many scores


@pytest.mark.parametrize("bits", [2, 16, None, 4.0])
def test_widths_that_bias_the_gradient_are_refused(bits):
    with pytest.raises(ValueError, match="must be 8 or 4, got"):
        check_attention_bits(bits)
    check_attention_bits(4)
