"""Softmax and its gradient in C against plain PyTorch: any number of columns, extreme scores, several threads."""

import math

import pytest
import torch
from attention_helpers import exact_rows, formula_gradients, packed_kept, relative, spec_of, tensors

from rmm_linear.backends import native
from rmm_linear.ops.native.attention import softmax_gradients
from rmm_linear.ops.native.masks import apply_mask
from rmm_linear.packing import attention_gradients as plain

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the C library was not built")
EPS = torch.finfo(torch.float32).eps


def both(scores, dp):
    found, expected = (scores.clone(), dp.clone()), (scores.double(), dp.double())
    softmax_gradients(*found)
    plain.softmax_gradients(*expected)
    return found, expected


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 31, 64, 100, 513])
@pytest.mark.parametrize("size", [0.1, 3.0, 30.0])
def test_all_widths_and_sizes(size, columns):
    """An exponential is off by 2 units in the last place and by those of its argument, which is below 8 · size."""
    scores, dp = torch.randn(2, 7, columns) * size, torch.randn(2, 7, columns)
    (p, ds), (exact_p, exact_ds) = both(scores, dp)
    relative = EPS * (4 + 8 * size + math.sqrt(columns))
    assert ((p - exact_p).abs() <= relative * exact_p + 1e-37).all()
    # dS is a difference of two numbers of the size of dP.
    assert ((ds - exact_ds).abs() <= 4 * relative * exact_p * dp.abs().amax(-1, keepdim=True) + 1e-36).all()


def test_hidden_keys_and_rows():
    scores, dp = torch.randn(6, 40), torch.randn(6, 40)
    scores[0, :39] = scores[1, 1:] = scores[2] = scores[3, 16:] = -math.inf
    (p, ds), (exact_p, exact_ds) = both(scores, dp)
    assert torch.equal(p == 0, exact_p == 0)
    assert (p[2] == 0).all()
    assert (ds[2] == 0).all()
    assert (p - exact_p).abs().max() < 20 * EPS
    assert (ds - exact_ds).abs().max() < 20 * EPS * dp.abs().max()


def test_scores_far_below_the_largest_are_zero_and_far_above_zero_are_no_problem():
    scores = torch.tensor([[0.0, -200.0, -86.0], [1e30, 1e30, 0.0], [-3e38, -3e38, -3e38], [500.0, 499.0, 100.0]])
    (p, _), (exact_p, _) = both(scores, torch.ones_like(scores))
    assert p[0, 1] == 0
    assert ((p - exact_p).abs() < 10 * EPS * exact_p + 1e-37).all()


@pytest.mark.parametrize("place", [0, 20, 36])
def test_a_nan_stays_in_its_row(place):
    scores, dp = torch.randn(3, 37), torch.randn(3, 37)
    scores[0, place] = math.nan
    scores[1] = -math.inf
    scores[1, place] = math.nan
    softmax_gradients(scores, dp)
    assert scores[0].isnan().all()
    assert dp[0].isnan().all()
    assert scores[1, place].isnan()
    assert dp[1, place].isnan()
    assert scores[2].isfinite().all()
    assert dp[2].isfinite().all()


def test_padding_at_the_end_of_all_sequences_with_dropout():
    """Then a block has fewer columns than the bits of dropout, of which it takes some."""
    q, k, v, y = tensors(3, 2, 2, 20, 20, 8, 8, dtype=torch.float32)
    valid = torch.arange(20) < torch.tensor([[14], [9], [17]])
    y = y * valid[:, :, None, None]
    mask, index = valid[:, None, None].expand(-1, -1, 20, -1), valid.flatten().nonzero().flatten()
    kept = torch.rand(3, 2, 20, 20, generator=torch.Generator().manual_seed(1)) > 0.3
    spec = spec_of(q, k, p=0.3)
    steps = plain.Steps(softmax_gradients, apply_mask)
    rows = exact_rows(q, k, v, index, index)
    found = plain.attention_gradients(y, rows, spec, mask, packed_kept(kept, index), index, index, steps=steps)
    exact = formula_gradients(*(tensor.double() for tensor in (q, k, v, y)), spec, mask, kept)
    assert relative(found, exact) < (100 * EPS) ** 2  # some tens of roundings of float32
    assert all((gradient.flatten(0, 1)[~valid.flatten()] == 0).all() for gradient in found)
