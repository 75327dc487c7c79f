"""Normal codes are unbiased with two rotations, not with one; their bytes are the formula's; odd inputs come back."""

import pytest
import torch
from cases import light_and_heavy
from statistical import Z

from rmm_linear import packing
from rmm_linear.packing import codes as chosen
from rmm_linear.packing import normal
from rmm_linear.packing.rounding import hadamard

WIDTHS = tuple(normal.LEVELS)


def seed(value):
    return torch.tensor([value])


def restored(matrix, bits, value=0):
    stored = packing.encode(matrix, bits, seed(value))
    return packing.decode(*stored, seed(value), bits, matrix.shape[1], matrix.dtype)


def large_columns(rows=4, columns=200):
    """Rows of small numbers with a few large ones, as transformers have them."""
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 0.1
    z[:, [3, 100, 180]] = torch.tensor([5.0, -3.0, 2.0], dtype=torch.float64)
    return z


def relative_bias(matrix, bits, draws):
    """M · ‖mean error‖² by the variance: Σ λ χ²₁ with Σ λ = 1 without bias, whose tail Z² bounds as that of one χ²₁."""
    errors = torch.stack([restored(matrix, bits, value) - matrix for value in range(draws)])
    return float(draws * errors.mean(0).square().sum() / errors.var(0).sum())


@pytest.mark.one_of(3)
@light_and_heavy(600, 4000)
@pytest.mark.parametrize("bits", WIDTHS)
def test_rows_with_a_few_large_columns_are_unbiased_by_two_rotations_and_not_by_one(bits, monkeypatch, draws):
    z = large_columns()
    assert relative_bias(z, bits, draws) < Z**2
    once = property(lambda noise: noise.signs[0].unsqueeze(1) * hadamard(normal.GROUP, noise.signs.device))
    monkeypatch.setattr(normal.NormalNoise, "rotation", once)
    assert relative_bias(z, bits, draws) > Z**2


@pytest.mark.parametrize("bits", chosen.CODES)
def test_normal_numbers_have_the_variance_of_the_table(bits):
    z = torch.randn(1000, 384, generator=torch.Generator().manual_seed(1))
    found = (restored(z, bits) - z).square().sum() / z.square().sum()
    # 3,000 groups, whose relative errors differ by a third at most: a standard error of 0.6 %.
    assert found == pytest.approx(chosen.RELATIVE_VARIANCE[bits], rel=0.025)


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_error_is_orthogonal_to_the_row_but_for_the_rounding_of_the_scale(bits):
    z = torch.randn(4000, 128, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = restored(z, bits)
    share = (found * z).sum(1) / z.square().sum(1)
    # A scale is rounded to one of two numbers 2^(1/8) apart, at random with the right mean.
    assert share.min() > 2 ** (-1 / 8)
    assert share.max() < 2 ** (1 / 8)
    assert abs(share.mean() - 1) < Z * share.std() / len(share) ** 0.5


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("shape", [(3, 128), (5, 130), (4, 7), (0, 9), (2, 384)])
def test_bytes_are_the_formula(bits, shape):
    codes, scales = packing.encode(torch.randn(shape), bits, seed(0))
    groups = -(-shape[1] // 128)
    assert codes.dtype == scales.dtype == torch.uint8
    assert codes.nbytes == shape[0] * groups * {2: 32, 1.6: 26, 1: 16}[bits]
    assert scales.nbytes == shape[0] * groups
    assert codes.nbytes + scales.nbytes == packing.encoded_bytes(*shape, bits)


@pytest.mark.parametrize("bits", WIDTHS)
def test_odd_groups_come_back(bits):
    z = torch.randn(5, 256)
    z[0] = 0
    z[1, 3] = float("nan")
    z[2, 200] = float("inf")
    z[3] *= 1e-30
    z[4, :128] *= 1e12
    found = restored(z, bits)
    assert (found[0] == 0).all()
    assert found[1, :128].isnan().all()
    assert found[1, 128:].isfinite().all()
    assert found[2, 128:].isnan().all()
    assert found[2, :128].isfinite().all()
    assert found[3].abs().max() < 1e-10
    assert found[4, :128].isnan().all()
    assert found[4, 128:].isfinite().all()


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_rotation_that_is_undone_after_a_product_is_that_of_the_rows(bits):
    z, y = torch.randn(40, 200, dtype=torch.float64), torch.randn(40, 3, dtype=torch.float64)
    codes, scales = packing.encode(z, bits, seed(5))
    rotated = packing.decode(codes, scales, seed(5), bits, 200, z.dtype, rotated=True)
    assert rotated.shape == (40, packing.rotated_columns(200, bits))
    product = packing.unrotate(y.T @ rotated, seed(5), bits, 200)
    # The rotation is made in float32.
    torch.testing.assert_close(product, y.T @ restored(z, bits, 5), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", [5, 0, 1.5, "2", None])
def test_other_widths_are_refused(bits):
    with pytest.raises(ValueError, match=r"bits must be 8, 4, 3, 2, 1\.6 or 1"):
        packing.encode(torch.randn(3, 4), bits, seed(0))
