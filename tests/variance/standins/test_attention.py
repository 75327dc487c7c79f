"""The noise of packed attention: the closed form of values against draws, and the bias that queries and keys make."""

import math

import pytest
import torch
from attention_helpers import exact_rows, spec_of, tensors
from statistical import Z, z_scores

from rmm_linear.ops.sketches import PACK, UNPACK
from rmm_linear.packing.attention import attention_rows
from rmm_linear.packing.attention_gradients import attention_gradients
from rmm_linear.variance.standins.attention import simulate_attention, value_variance


def packed_values(q, k, v, y, spec, mask, bits, draws):
    """Gradients from exact queries and keys and packed values, and the qparams of the values, for every seed."""
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
    for found, qparams in packed_values(q, k, v, y, spec, mask, bits, draws):
        assert torch.equal(found[2], exact[2])
        errors = [one - wanted for one, wanted in zip(found, exact, strict=True)]
        squares.append(torch.stack([errors[i].square().sum() for i in (0, 1)]))
        sums.append(torch.stack([(errors[i] * exact[i]).sum() for i in (0, 1)]))
        variances = value_variance(q, k, y.transpose(1, 2), qparams, scale=spec.scale, mask=mask, is_causal=causal)
        stated.append(torch.stack(variances))
    squares, stated = torch.stack(squares), torch.stack(stated)
    # The ranges, and so the variance, differ from draw to draw with the rotation: compared draw by draw.
    assert (z_scores(squares - stated).abs() < Z).all()
    assert (squares.std(0) / math.sqrt(draws) < 0.03 * stated.mean(0)).all()
    assert (z_scores(torch.stack(sums)).abs() < Z).all()


def check_bias(draws, of_error):
    """At 4 bits, bias² of each gradient is at most 0.002 of its noise: the target of a whole model."""
    q, k, v, y = tensors(2, 4, 2, 32, 32, 32, 32, torch.float32)
    for noise in simulate_attention(q, k, v, y.transpose(1, 2), bits=4, draws=draws):
        assert noise.standard_error < of_error * noise.variance
        assert noise.bias - 2 * noise.standard_error < 0.002 * noise.variance
        assert 0.005 < noise.variance / noise.exact < 0.1
    return noise


def test_the_bias_is_small_beside_the_noise():
    check_bias(200, 5e-4)


@pytest.mark.montecarlo
def test_the_bias_is_small_beside_the_noise_at_length():
    check_bias(3000, 4e-5)


def test_a_simulation_with_too_few_bits_or_draws_is_refused():
    q, k, v, y = tensors(1, 1, 1, 4, 4, 4, 4, torch.float32)
    with pytest.raises(ValueError, match="attention_bits must be 8 or 4, got 2"):
        simulate_attention(q, k, v, y.transpose(1, 2), bits=2)
    with pytest.raises(ValueError, match="draws must be at least 1"):
        simulate_attention(q, k, v, y.transpose(1, 2), draws=0)


def test_values_may_have_other_bits():
    """dV has no part of the values, so it stays as it is; the other gradients get the noise of wider steps."""
    q, k, v, y = tensors(2, 4, 2, 8, 8, 32, 32, torch.float32)
    narrow, wide = (
        simulate_attention(q, k, v, y.transpose(1, 2), bits=8, value_bits=bits, draws=20) for bits in (4, None)
    )
    assert narrow[2] == wide[2]
    assert all(narrow[i].variance > 10 * wide[i].variance for i in (0, 1))
    with pytest.raises(ValueError, match="attention_bits"):
        simulate_attention(q, k, v, y.transpose(1, 2), value_bits=2)
