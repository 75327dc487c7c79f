"""The noise of what packed operations save: closed forms against simulation, and the bias of attention."""

import math

import pytest
import torch
from attention_helpers import exact_rows, spec_of, tensors
from norm_helpers import EPS, exact, rows_of
from pointwise_helpers import ROUNDED, randn
from statistical import Z, assert_moments, assert_variance, z_scores

from rmm_linear.ops.derivatives import apply_derivative, pack_derivative, stored_parts
from rmm_linear.ops.gated import APPLY_GATED, PACK_GATED
from rmm_linear.ops.norms import NORM_GRADIENTS, PACK_NORM
from rmm_linear.ops.sketches import PACK, UNPACK
from rmm_linear.packing.attention import attention_rows
from rmm_linear.packing.attention_gradients import attention_gradients
from rmm_linear.packing.pointwise import FUNCTIONS, Pointwise
from rmm_linear.packing.rounding import scales_of
from rmm_linear.packing.stored import views
from rmm_linear.variance.simulation import Simulation
from rmm_linear.variance.standins.attention import simulate_attention, value_variance
from rmm_linear.variance.standins.gated import gated_variance, product_variance
from rmm_linear.variance.standins.norms import norm_input_variance, norm_weight_variance
from rmm_linear.variance.standins.pointwise import element_variance, weight_gradient_variance

# Attention


def packed_values(q, k, v, y, spec, mask, bits, draws):
    """Gradients from exact queries and keys and packed values, and the scales of the values, for every seed."""
    rows, values = exact_rows(q, k, v), attention_rows(q, k, v)[2]
    for seed in range(draws):
        packed = PACK(values.float(), bits, torch.tensor([seed]))
        unpacked = UNPACK(*packed, torch.tensor([seed]), bits, values.shape[1], torch.float64)
        found = attention_gradients(y, (*rows[:2], lambda b, e, u=unpacked: u[b:e]), spec, mask)
        yield found, packed[1]


AT_LENGTH = [pytest.param(*case, 5_000, marks=pytest.mark.montecarlo) for case in ((8, False), (2, True))]


@pytest.mark.parametrize(("bits", "causal", "draws"), [(4, False, 400), (2, True, 400), *AT_LENGTH])
def test_packed_values_leave_gradients_unbiased_with_the_variance_of_the_closed_form(bits, causal, draws):
    """Values enter linearly, so both hold for 2 bits as well."""
    q, k, v, y = tensors(2, 4, 2, 6, 6, 8, 32)
    v = v.float().double()  # what is packed is float32
    spec, mask = spec_of(q, k, is_causal=causal), None if causal else torch.rand(2, 1, 6, 6) > 0.2
    exact = attention_gradients(y, exact_rows(q, k, v), spec, mask)
    stated, squares, sums = [], [], []
    for found, scales in packed_values(q, k, v, y, spec, mask, bits, draws):
        assert torch.equal(found[2], exact[2])
        errors = [one - wanted for one, wanted in zip(found, exact, strict=True)]
        squares.append(torch.stack([errors[i].square().sum() for i in (0, 1)]))
        sums.append(torch.stack([(errors[i] * exact[i]).sum() for i in (0, 1)]))
        variances = value_variance(q, k, y.transpose(1, 2), scales, scale=spec.scale, mask=mask, is_causal=causal)
        stated.append(torch.stack(variances))
    squares, stated = torch.stack(squares), torch.stack(stated)
    # The ranges, and so the variance, differ from draw to draw with the rotation: compared draw by draw.
    assert (z_scores(squares - stated).abs() < Z).all()
    assert (squares.std(0) / math.sqrt(draws) < 0.03 * stated.mean(0)).all()
    assert (z_scores(torch.stack(sums)).abs() < Z).all()


@pytest.mark.parametrize(("draws", "of_error"), [(200, 5e-4), pytest.param(3000, 4e-5, marks=pytest.mark.montecarlo)])
def test_the_bias_is_small_compared_with_the_noise(draws, of_error):
    """At 4 bits, bias² of each gradient is at most 0.002 of its noise: the target of a whole model."""
    q, k, v, y = tensors(2, 4, 2, 32, 32, 32, 32, torch.float32)
    for noise in simulate_attention(q, k, v, y.transpose(1, 2), bits=4, draws=draws):
        assert noise.standard_error < of_error * noise.variance
        assert noise.bias - 2 * noise.standard_error < 0.002 * noise.variance
        assert 0.005 < noise.variance / noise.exact < 0.1


def test_values_may_have_other_bits():
    """dV has no part of the values, so it stays as it is; the other gradients get the noise of wider steps."""
    q, k, v, y = tensors(2, 4, 2, 8, 8, 32, 32, torch.float32)
    narrow, wide = (
        simulate_attention(q, k, v, y.transpose(1, 2), bits=8, value_bits=bits, draws=20) for bits in (4, None)
    )
    assert narrow[2] == wide[2]
    assert all(narrow[i].variance > 10 * wide[i].variance for i in (0, 1))
    for wrong, text in (
        ({"bits": 2}, "bits must be 8 or 4"),
        ({"value_bits": 2}, "attention_bits"),
        ({"draws": 0}, "1"),
    ):
        with pytest.raises(ValueError, match=text):
            simulate_attention(q, k, v, y.transpose(1, 2), **wrong)


# Gated MLPs

BOTH = (True, True)


def exact_gradients(a, b, y, activation):
    function = FUNCTIONS[activation]
    return y * b * function.derivative(a), y * function.value(a)


GATED = [
    pytest.param("silu", bits, n, 4_000, 0.02, marks=pytest.mark.montecarlo) for bits in (2, 4, 8) for n in (128, 70)
]
FEW = [("silu", 2, 128), ("silu", 4, 70), ("silu", 8, 5), ("gelu_tanh", 4, 128), ("gelu", 2, 70), ("relu", 4, 70)]


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("activation", "bits", "columns", "draws", "widest"), [*((*case, 150, 0.1) for case in FEW), *GATED]
)
def test_a_gated_mlps_simulated_variance_by_the_stated_one_is_one(activation, bits, columns, draws, widest):
    generator = torch.Generator().manual_seed(3)
    a, b, y = (torch.randn(5, columns, generator=generator, dtype=torch.float64) for _ in range(3))
    y *= torch.randn(5, 1, generator=generator, dtype=torch.float64).exp()
    exact = exact_gradients(a, b, y, activation)
    ratios = []
    for seed in range(draws):
        seeds = torch.tensor([seed, seed + 1_000_000])
        packed = PACK_GATED(a, b, seeds, activation, bits, BOTH, None)
        found = APPLY_GATED(y, seeds, packed, bits, None)
        stated = [product_variance(y, one.scales) for one in packed]  # for every rotation its own
        errors = [(one - other).square().sum() for one, other in zip(found, exact, strict=True)]
        ratios.append(torch.stack([e / s for e, s in zip(errors, stated, strict=True)]))
    for ratio in torch.stack(ratios).T:
        assert_variance(Simulation.of(ratio.split(1)), 1.0, widest=widest)


def test_the_variance_of_a_gated_mlp_is_that_of_both_products():
    a, b, y = (torch.randn(5, 70) for _ in range(3))
    seeds = torch.tensor([1, 2])
    packed = PACK_GATED(a, b, seeds, "silu", 4, BOTH, None)
    found = gated_variance(a, b, y, activation="silu", bits=4, seeds=seeds)
    assert found == tuple(product_variance(y, one.scales) for one in packed)
    scales = scales_of(packed[0].scales)
    by_hand = sum(
        float(y[i, j].double() ** 2 * scales[i, j // 64].double() ** 2 / 12) for i in range(5) for j in range(70)
    )
    assert float(found[0]) == pytest.approx(by_hand, rel=1e-12)


# Norms


@pytest.mark.parametrize(("bits", "centered", "columns"), [(2, True, 96), (2, False, 64), (4, True, 40)])
def test_the_variance_of_every_row_and_every_element_of_a_norms_weight(bits, centered, columns):
    """Each within Z of its own standard error, which for that many draws is less than a sixth of it."""
    draws, (x, y, weight) = 400, rows_of(columns, torch.float32)
    dx, dgamma, _ = exact(x, y, weight, centered)
    rows, elements = [], []
    for value in range(draws):
        seed, options = torch.tensor([value]), {"bits": bits, "seed": value, "eps": EPS, "centered": centered}
        saved = PACK_NORM(x, bits, seed, EPS, centered)
        found = NORM_GRADIENTS(y, saved, bits, seed, weight, centered=centered)
        # The closed forms hold for the scales of a draw, so each draw is compared with its own.
        rows.append((found.x - dx).square().sum(1) / norm_input_variance(x, y, weight, **options))
        elements.append((found.weight - dgamma).square() / norm_weight_variance(x, y, **options))
    for ratios in (torch.stack(rows), torch.stack(elements)):
        errors = ratios.std(0) / math.sqrt(draws)
        assert ((ratios.mean(0) - 1).abs() < Z * errors).all()
        assert (errors < 1 / 6).all()


def test_that_of_a_norm_scales_with_the_gradient_and_not_with_the_input():
    x, y, weight = rows_of(96)
    options = {"bits": 2, "seed": 3, "eps": 0.0}
    one, other = (norm_input_variance(scale * x, y, weight, **options) for scale in (1.0, 4.0))
    torch.testing.assert_close(other * 16, one)
    torch.testing.assert_close(norm_input_variance(x, 3 * y, weight, **options), 9 * one)
    sums = norm_weight_variance(x, y, **options)
    torch.testing.assert_close(norm_weight_variance(4 * x + 1, 3 * y, **options), 9 * sums)


def test_nothing_to_round_in_a_norm_is_no_variance():
    x, y, weight = torch.zeros(3, 70), torch.randn(3, 70), torch.ones(70)
    options = {"bits": 2, "seed": 3, "eps": EPS}
    assert not norm_input_variance(x, y, weight, **options).any()
    assert not norm_weight_variance(x, y, **options).any()


# Activations

TOKENS, INPUTS, COLUMNS = 30, 6, 70


def simulate(function, bits, draws):
    """Errors of dW, the exact dW, and what is stored: tokens of very different sizes, as in training."""
    size = randn(TOKENS, 1, seed=4).exp()
    x, below = randn(TOKENS, INPUTS, seed=5) * size, randn(INPUTS, COLUMNS, seed=6)
    z, y = x @ below, randn(TOKENS, COLUMNS, seed=7) * size
    exact = (y.double() * function.derivative(z.double())).T @ x.double()
    how, errors, variances = (function.name, function.parameters, bits), [], []
    for seed in range(draws):
        stored = pack_derivative(z, None, seed, *how)
        errors.append(apply_derivative(y, stored, None, *how).double().T @ x.double() - exact)
        if not function.is_bounded:
            scales = views(stored, stored_parts(function, bits, TOKENS, COLUMNS))[2]
            variances.append(weight_gradient_variance(x, y, element_variance(function, bits, scales, COLUMNS)))
    return x, y, exact, torch.stack(errors), variances


LIGHT = [(function, bits, 300) for function in ROUNDED[:3] for bits in (8, 4, 2, 1)]
LIGHT += [(Pointwise("relu_squared"), bits, 300) for bits in (8, 4, 2)]  # not bounded, so 1 bit is not offered
HEAVY = [pytest.param(one, bits, 5_000, marks=pytest.mark.montecarlo) for one in ROUNDED for bits in (8, 4, 2, 1)]


@pytest.mark.parametrize(("function", "bits", "draws"), [*LIGHT, *HEAVY], ids=str)
def test_the_variance_of_an_activations_weight_gradient_is_the_closed_form(function, bits, draws):
    x, y, exact, errors, variances = simulate(function, bits, draws)
    # ‖error‖² sums 420 numbers, of which those of a column share their tokens: below 25 % of spread for one draw.
    if function.is_bounded:
        stated = weight_gradient_variance(x, y, element_variance(function, bits))
        assert_moments(errors, exact, stated, widest=0.25 / draws**0.5)
    else:
        assert_moments(errors, exact, 0.0, widest=0.5 / draws**0.5, roundings=torch.stack(variances))


def test_exact_functions_add_nothing():
    assert float(element_variance(Pointwise("relu"), 1)) == 0
    x, y = randn(3, 2), randn(3, 4)
    assert float(weight_gradient_variance(x, y, element_variance(Pointwise("leaky_relu", (0.1,)), 1))) == 0
