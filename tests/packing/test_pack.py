"""Packing is unbiased, its variance is exact, its bytes are the formula's, and it meets odd inputs."""

import math

import pytest
import torch
from cases import light_and_heavy
from helpers import product_error
from hypothesis import given, settings
from hypothesis import strategies as st
from statistical import Z, assert_variance, z_scores

from rmm_linear.packing.pack import pack, packed_bytes, rounding_variance, unpack, unrotate
from rmm_linear.packing.rounding import WIDTHS, RoundingNoise, rotate_groups, scales_of
from rmm_linear.variance.simulation import Simulation


def seed(value):
    return torch.tensor([value])


def restored(matrix, bits, value=0):
    return unpack(*pack(matrix, bits, seed(value)), seed(value), bits, matrix.shape[1], matrix.dtype)


def stated_variance(matrix, bits, value=0):
    return rounding_variance(pack(matrix, bits, seed(value))[1], matrix.shape[1])


def turned(matrix, value=0):
    return rotate_groups(matrix, RoundingNoise.of(seed(value), 0, 64).rotation)


def heavy(rows, columns):
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randn(rows, 1, generator=generator, dtype=torch.float64).exp()
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64) * lengths + 1


@pytest.mark.one_of(5)
@light_and_heavy(400, 20_000)
@pytest.mark.parametrize(("bits", "columns"), [(8, 64), (4, 130), (3, 70), (3, 64), (2, 5), (2, 64)])
def test_unbiased_with_the_stated_variance(bits, columns, draws):
    z = heavy(6, columns)
    found = torch.stack([restored(z, bits, value) for value in range(draws)])
    stated = torch.stack([stated_variance(z, bits, value) for value in range(draws)])  # for every rotation its own
    excess = (found - z).square().sum(2) - stated
    bias = draws * (found.mean(0) - z).square().sum() / stated.mean(0).sum()
    spread = z_scores(excess)
    # An unbiased sum of independent errors has bias 1 ± √(2/elements); Z² bounds it as one χ²₁ would.
    assert bias < Z**2, bias
    assert spread.abs().max() < Z + 0.5, spread  # the largest of six


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("shape", [(3, 64), (5, 130), (4, 7), (2, 1), (0, 9)])
def test_bytes_are_the_formula(bits, shape):
    codes, scales = pack(torch.randn(shape), bits, seed(0))
    assert codes.dtype == scales.dtype == torch.uint8
    assert codes.nbytes + scales.nbytes == packed_bytes(*shape, bits)
    planes = (2, 1) if bits == 3 else (bits,)
    row = sum(math.ceil(shape[1] * width / 8) for width in planes) + math.ceil(shape[1] / 64)
    assert packed_bytes(*shape, bits) == shape[0] * row
    assert unpack(codes, scales, seed(0), bits, shape[1], torch.float32).shape == shape


@pytest.mark.parametrize("bits", WIDTHS)
def test_error_is_below_one_step_of_the_group(bits):
    z = turned(heavy(6, 130).float())
    tops = torch.cat([group.abs().amax(1, keepdim=True).expand_as(group) for group in z.split(64, 1)], 1)
    step = 2 * tops / (2**bits - 1) * 2 ** (1 / 8)  # the next of the scales, eight to an octave
    found = turned(restored(unrotate(z, seed(0)), bits))
    assert ((found - z).abs() <= step / 2 * (1 + 1e-4)).all()


@pytest.mark.parametrize("bits", [2, *(pytest.param(bits, marks=pytest.mark.thorough) for bits in (3, 4, 8))])
@pytest.mark.thorough
def test_the_error_has_one_distribution_whatever_the_data(bits):
    """Uniform on ± scale / 2, for elements that lie on a code as for those between two: second and fourth moments."""
    top = (2**bits - 1) / 2
    z = torch.tensor([[0.0, 0.25, 0.5, 0.9, -0.5, top * (1 - 2**-17)]], dtype=torch.float64)  # in steps of 1
    draws, scale = 2_000, float(scales_of(pack(z, bits, seed(0))[1]))
    assert scale == 1
    errors = torch.cat([restored(z, bits, value) - z for value in range(draws)]) / scale
    # 8 bits: t + u is rounded in float32 by 2⁻¹⁶ of a step.
    assert errors.abs().max() <= 0.5 + 2**-15
    for power, mean in ((1, 0.0), (2, 1 / 12), (4, 1 / 80)):
        spread = (1 / (2 * power + 1) / 4**power - mean**2) ** 0.5
        found = errors.pow(power).mean(0)
        assert (found - mean).abs().max() < (Z + 0.5) * spread / draws**0.5, (power, found)


@pytest.mark.parametrize("bits", WIDTHS)
def test_stochastic_rounding_of_the_same_codes_is_twice_as_noisy(bits):
    z = torch.randn(200, 768, generator=torch.Generator().manual_seed(2)) ** 3
    codes, scales = pack(z, bits, seed(3))
    noise = RoundingNoise.of(seed(3), 200, 768)
    u = (noise.rows[:, None] ^ noise.columns).view(torch.float32) - 1
    dithered = unpack(codes, scales, seed(3), bits, 768, z.dtype, rotated=True)
    plain = dithered - scales_of(scales).repeat_interleave(64, 1) * (0.5 - u)
    rotated, stated = turned(z, 3), rounding_variance(scales, 768).sum()
    # Of 153,600 errors, pairwise independent: the mean of the squares is off by √(0.8 / 153,600) = 0.23 % of itself,
    # times at most 4 where groups' scales differ.
    assert (dithered - rotated).square().sum() == pytest.approx(float(stated), rel=Z * 0.01)
    assert (plain - rotated).square().sum() == pytest.approx(2 * float(stated), rel=Z * 0.02)


@pytest.mark.parametrize("bits", WIDTHS)
def test_rows_are_rounded_independently(bits):
    """16 equal rows: with one chance for all, the variance of their sum would be 16 times as large."""
    z = torch.rand(1, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64).expand(16, 40)
    errors = torch.stack([(restored(z, bits, value) - z).sum(0).square().sum() for value in range(400)])
    stated = float(stated_variance(z, bits).sum())  # 40 columns are no whole group: no rotation, one variance
    assert_variance(Simulation.of(errors.split(1)), stated, widest=0.1, whole=stated)


def test_turning_back_gives_the_matrix():
    z = heavy(6, 200).float()
    found = turned(z, 5)
    # Of 64 terms ± z/8, a sum is off by 64 · 2⁻²⁴ of the row's norm at most; there and back, by twice that.
    near = 2 * 64 * 2**-24 * z.norm(dim=1, keepdim=True)
    assert ((found[:, :192].norm(dim=1) - z[:, :192].norm(dim=1)).abs() <= near[:, 0]).all()
    assert not torch.isclose(found[:, :192], z[:, :192]).all(0).any()
    assert torch.equal(found[:, 192:], z[:, 192:])
    assert ((unrotate(found, seed(5)) - z).abs() <= near).all()


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_turn_can_be_undone_after_a_product(bits):
    z, y = heavy(40, 200).float(), torch.randn(40, 7)
    codes, scales = pack(z, bits, seed(5))
    late = unrotate(y.T @ unpack(codes, scales, seed(5), bits, 200, z.dtype, rotated=True), seed(5))
    soon = restored(z, bits, 5)
    near = 2 * product_error(y.T, soon)  # and of the rotation's sums
    torch.testing.assert_close(late, y.T @ soon, rtol=0, atol=near)


def test_turning_makes_one_large_column_harmless():
    z = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    z[:, 7] = 30
    left_alone = stated_variance(z[:, :63], 2).mean()  # 63 columns are no whole group
    assert stated_variance(z, 2).mean() < left_alone / 4


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_constant_group_is_unbiased(bits):
    z = torch.full((1, 64), 1.2345, dtype=torch.float64)  # no bfloat16 number
    mean = torch.stack([restored(z, bits, value) for value in range(200)]).mean()
    noise = torch.stack([stated_variance(z, bits, value) for value in range(200)]).mean()
    assert abs(float(mean) - 1.2345) < Z * math.sqrt(float(noise) / 64 / (200 * 64)) + 2e-7
    assert torch.equal(restored(torch.zeros(2, 70), bits), torch.zeros(2, 70))


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_group_nan(value, bits):
    """A gradient scaler sees it, and skips the step."""
    z = torch.randn(3, 130)
    z[1, 70] = value
    result = restored(z, bits)
    assert result[1, 64:128].isnan().all()
    result[1, 64:128] = 0
    assert result.isfinite().all()


@pytest.mark.parametrize("bits", [5, 16, None])
def test_other_widths_are_refused(bits):
    with pytest.raises(ValueError, match="bits must be 8, 4, 3 or 2"):
        pack(torch.randn(2, 2), bits, seed(0))


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from(WIDTHS),
    values=st.lists(st.floats(-(2.0**30), 2.0**30, width=32), min_size=1, max_size=150),
)
def test_no_element_leaves_the_codes_and_scales_are_the_least_that_do(bits, values):
    z = torch.tensor([values], dtype=torch.float32)
    bytes_ = pack(z, bits, seed(1))[1][0].int()
    for number, (plain, group) in enumerate(
        zip(z[0].double().split(64), turned(z, 1)[0].double().split(64), strict=True)
    ):
        # pack may rotate in another order of summation: two sums of 64 terms ± z/8, each off by 64·2⁻²⁴ of their sizes.
        apart = 2 * 64 * 2**-24 * plain.abs().sum() / 8 if len(plain) == 64 else 0.0
        needed, byte = group.abs().max() * 2 / (2**bits - 1), bytes_[number]
        below, scale = (float(scales_of(byte.clamp(min=1) - less)) for less in (1, 0))
        assert (scale if byte else 0.0) >= needed - apart
        assert below <= needed * (1 + 2**-17) + apart or byte == 1


def test_a_byte_stands_for_a_larger_scale_than_the_one_before():
    """Eight to an octave from 2⁻¹⁸ to 2¹², four octaves apart outside; zero first, and NaN for what is beyond."""
    scales = scales_of(torch.arange(256)).double()
    assert scales[0] == 0
    assert (scales[1:255].diff() > 0).all()
    assert scales[255].isnan()
    assert (scales[9], scales[249], scales[254]) == (2.0**-18, 2.0**12, 2.0**32)
    torch.testing.assert_close(scales[10:250] / scales[9:249], torch.full((240,), 2 ** (1 / 8), dtype=torch.float64))
    assert unpack(*pack(torch.full((1, 64), 1e12), 4, seed(0)), seed(0), 4, 64, torch.float32).isnan().all()
