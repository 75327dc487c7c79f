"""Layers that sample rows by their weight: bytes, checkpointing, siblings, autocast, masks, and inputs at the edges."""

import math

import pytest
import torch
from cases import QUARTER, every_sampler, every_width
from helpers import heavy_tailed

from rmm_linear import RMMConfig, sketched_linear
from rmm_linear.context.sketch_cache import SketchCache
from rmm_linear.layers.function import LinearCall, saved_linear
from rmm_linear.ops.save import save_input
from rmm_linear.ops.sketches import weight_gradient
from rmm_linear.sketches import UNIFORM_MIX, TokenMask
from rmm_linear.spec import SaveSpec


def spec_of(kind, rows, bits=None):
    return SaveSpec(kind, rows, None, bits, UNIFORM_MIX)


def saved(run):
    """The tensors that ``run()`` keeps for the backward pass."""
    tensors = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: tensors.append(t) or t, lambda t: t):
        output = run()
    assert output is not None
    return tensors


# Bytes


@every_width
@pytest.mark.parametrize("memory", [0.05, 0.2, 0.9])
@every_sampler
def test_memory_counts_the_rows_and_their_scales(kind, memory, bits):
    """The most rows that fit, the seed's 8 bytes aside."""
    spec = RMMConfig(kind=kind, memory=memory, bits=bits, min_rows=1).spec(1000, 128, 2)
    budget = memory * 1000 * 128 * 2 + 8
    assert spec.bytes(1000, 128, 2) <= budget
    more = spec_of(kind, spec.rows + 1, bits)
    assert spec.rows == 1000 or more.bytes(1000, 128, 2) > budget


# The same gradient in every setting


@every_width
@every_sampler
def test_siblings_keep_one_sketch_and_ask_once_what_is_expected(kind, bits):
    x, y = heavy_tailed(40, 70, 3, torch.float32)
    weights = [torch.zeros(3, 70, requires_grad=True) for _ in range(3)]
    shared, asked = SketchCache(), []

    def expected():
        asked.append(1)
        return y.norm(dim=1)

    spec = spec_of(kind, 10, bits)
    outputs = []

    def run():
        for number, weight in enumerate(weights):
            outputs.append(saved_linear(x, weight, None, LinearCall(spec, 7, None, None, shared, number, expected)))
        return outputs

    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in saved(run)}
    assert len(asked) == 1
    assert sum(tensors.values()) == spec.bytes(40, 70, 4)
    for output in outputs:
        output.backward(y)
    assert torch.equal(weights[0].grad, weights[1].grad)
    alone = weight_gradient(y, save_input(x, spec, None, 7, y.norm(dim=1)), spec, 70, None)
    torch.testing.assert_close(weights[2].grad, alone)


@every_sampler
def test_what_is_expected_of_the_gradient_lowers_the_noise(kind):
    """With ‖y‖ known, the mean squared error over 100 seeds is less than half of that without, as the variances say."""
    x, y = heavy_tailed(60, 5, 4)
    y[::2] *= 0.01
    exact, spec = y.T @ x, spec_of(kind, 12)

    def error(expected):
        estimates = [weight_gradient(y, save_input(x, spec, None, s, expected), spec, 5, None) for s in range(100)]
        return sum(float((estimate - exact).square().sum()) for estimate in estimates)

    assert error(y.norm(dim=1)) < 0.5 * error(None)


# Masks and edges


@pytest.mark.diagonal
@every_width
@every_sampler
def test_tokens_that_fit_are_exact_but_for_rounding(kind, bits):
    """8 tokens count and 10 rows are kept: the two rows too many are nothing, whatever padding holds.

    Light tails: with heavy ones, the error of an element is so rare that 200 draws may never see it.
    """
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(40, size, generator=generator, dtype=torch.float64) for size in (5, 3))
    mask = torch.arange(40) % 5 == 2
    y, ranks = y * mask.unsqueeze(1), TokenMask.of(mask)
    x[~mask] = math.nan
    exact = y[mask].T @ x[mask]
    for rows in (10, 40):
        spec = spec_of(kind, rows, bits)
        estimates = [
            weight_gradient(y, save_input(x, spec, ranks, s), spec, 5, ranks) for s in range(1 if bits is None else 200)
        ]
        if bits is None:
            torch.testing.assert_close(estimates[0], exact)
        else:
            errors = torch.stack(estimates) - exact
            assert (errors.mean(0).abs() < 4.5 * errors.std(0) / math.sqrt(200) + 1e-9).all()  # the largest of 15 z


@every_width
@every_sampler
def test_an_input_of_zeros_has_a_gradient_of_zeros(kind, bits):
    weight = torch.zeros(3, 6, requires_grad=True)
    config = RMMConfig(kind=kind, bits=bits, **QUARTER)
    sketched_linear(torch.zeros(40, 6), weight, config=config, seed=1).sum().backward()
    assert not weight.grad.any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@every_sampler
def test_a_row_that_is_not_finite_leaves_the_others_their_probabilities(kind, value):
    """A loss scaler has to see it: it is among the most likely rows. The sampled rows are rows of X."""
    x = heavy_tailed(40, 6, 2, torch.float32)[0]
    x[17, 2] = value
    seen = []
    for seed in range(20):
        z, index, scale = save_input(x, spec_of(kind, 10), None, seed)
        assert scale.isfinite().all()
        torch.testing.assert_close(z, x[index] * scale.unsqueeze(1), equal_nan=True)
        seen.append(bool((index == 17).any()))
    assert sum(seen) > 10


def test_a_mix_outside_its_range_is_refused():
    for value, error in ((0, ValueError), (1.5, ValueError), (-0.1, ValueError), ("a", TypeError), (None, TypeError)):
        with pytest.raises(error, match=r"uniform_mix must be (in|a number in) \(0, 1\], got"):
            RMMConfig(kind="wta", uniform_mix=value)
    assert RMMConfig(kind="wta", ratio=0.2, uniform_mix=0.5).spec(1000, 8, 4).uniform_mix == 0.5
    assert RMMConfig(kind="rows", ratio=0.2, uniform_mix=0.5).spec(1000, 8, 4).uniform_mix == 0
    with pytest.raises(ValueError, match="block is for rademacher, gaussian, hadamard only"):
        RMMConfig(kind="wta", block=8)
