"""The variance of a gated MLP's gradients is the closed form's."""

import pytest
import torch
from statistical import assert_variance

from rmm_linear.ops.gated import APPLY_GATED, PACK_GATED
from rmm_linear.packing.pointwise import FUNCTIONS
from rmm_linear.variance.simulation import Simulation
from rmm_linear.variance.standins.gated import gated_variance, product_variance

BOTH = (True, True)


def check(activation, bits, columns, draws, widest):
    generator = torch.Generator().manual_seed(3)
    a, b, y = (torch.randn(5, columns, generator=generator, dtype=torch.float64) for _ in range(3))
    y *= torch.randn(5, 1, generator=generator, dtype=torch.float64).exp()
    exact = exact_gradients(a, b, y, activation)
    ratios = []
    for seed in range(draws):
        seeds = torch.tensor([seed, seed + 1_000_000])
        packed = PACK_GATED(a, b, seeds, activation, bits, BOTH, None)
        found = APPLY_GATED(y, seeds, packed, bits, None)
        stated = [product_variance(y, one.qparams) for one in packed]  # for every rotation its own
        errors = [(one - other).square().sum() for one, other in zip(found, exact, strict=True)]
        ratios.append(torch.stack([e / s for e, s in zip(errors, stated, strict=True)]))
    for ratio in torch.stack(ratios).T:
        assert_variance(Simulation.of(ratio.split(1)), 1.0, widest=widest)


def exact_gradients(a, b, y, activation):
    function = FUNCTIONS[activation]
    return y * b * function.derivative(a), y * function.value(a)


@pytest.mark.parametrize(
    ("activation", "bits", "columns"),
    [("silu", 2, 128), ("silu", 4, 70), ("silu", 8, 5), ("gelu_tanh", 4, 128), ("gelu", 2, 70), ("relu", 4, 70)],
)
def test_simulated_by_stated_is_one(activation, bits, columns):
    check(activation, bits, columns, 150, 0.1)


@pytest.mark.montecarlo
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("columns", [128, 70])
def test_simulated_by_stated_is_one_heavy(bits, columns):
    check("silu", bits, columns, 4_000, 0.02)


def test_the_variance_is_that_of_both_products():
    a, b, y = (torch.randn(5, 70) for _ in range(3))
    seeds = torch.tensor([1, 2])
    packed = PACK_GATED(a, b, seeds, "silu", 4, BOTH, None)
    found = gated_variance(a, b, y, activation="silu", bits=4, seeds=seeds)
    assert found == tuple(product_variance(y, one.qparams) for one in packed)
    by_hand = sum(
        float(y[i, j].double() ** 2 * packed[0].qparams[i, j // 64, 1].double() ** 2 / 12)
        for i in range(5)
        for j in range(70)
    )
    assert float(found[0]) == pytest.approx(by_hand, rel=1e-12)
