"""Gradients of norms over channels from one packed copy: unbiased, with the stated variance."""

import math
from unittest import mock

import pytest
import torch
from cases import light_and_heavy
from statistical import Z, assert_variance, z_scores
from torch.nn import functional as F

from rmm_linear.ops.channel_norms import CHANNEL_GRADIENTS, PACK_CHANNELS
from rmm_linear.packing import WIDTHS, channel_norms
from rmm_linear.variance.simulation import Simulation
from rmm_linear.variance.standins.norms import channel_norm_variance

EPS, SAMPLES, CHANNELS = 1e-5, 4, 12
KINDS = {"batch": 0, "group": 4, "instance": CHANNELS}


def data(length):
    """X with means and sizes of its channels, Y that depends on it, and a weight."""
    generator = torch.Generator().manual_seed(length)
    x, y = torch.randn(2, SAMPLES, CHANNELS, length, generator=generator)
    x = x * torch.linspace(0.3, 3, CHANNELS)[:, None] + torch.linspace(-2, 2, CHANNELS)[:, None]
    return x, 0.3 * y + 0.2 * x + 0.1, torch.linspace(0.5, 1.5, CHANNELS)


def exact(x, y, weight, groups):
    """dX, dγ and dβ by autograd, in float64."""
    x, weight = (part.double().requires_grad_() for part in (x, weight))
    bias = torch.zeros_like(weight, requires_grad=True)
    norm = F.batch_norm(x, None, None, weight, bias, True, eps=EPS) if not groups else None
    norm = F.group_norm(x, groups, weight, bias, EPS) if norm is None else norm
    return torch.autograd.grad(norm, (x, weight, bias), y.double())


def draw(x, y, weight, bits, groups, value, is_last=False):
    seed = torch.tensor([value])
    x, y = (part.transpose(1, 2).unsqueeze(-1) if is_last else part.unsqueeze(1) for part in (x, y))
    saved = PACK_CHANNELS(x.contiguous(), bits, seed, EPS, groups)
    found = CHANNEL_GRADIENTS(y.contiguous(), saved, bits, seed, weight, groups)
    return found._replace(x=found.x.squeeze(-1).transpose(1, 2) if is_last else found.x.squeeze(1))


@pytest.mark.pairs
@light_and_heavy(60, 4_000)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 7, 80])
@pytest.mark.parametrize("bits", WIDTHS)
def test_unbiased_with_the_stated_variance(bits, length, kind, draws):
    """Of one position, channels of which several are a set; groups of 64 elements lie in several sets."""
    groups, (x, y, weight) = KINDS[kind], data(length)
    if kind == "instance" and length == 1:
        return  # h is 0 for any input
    dx, dgamma, dbeta = exact(x, y, weight, groups)
    errors, sums, stated, stated_sums = [], [], [], []
    for value in range(draws):
        found = draw(x, y, weight, bits, groups, value)
        errors.append(found.x.double() - dx)
        sums.append(found.weight.double() - dgamma)
        one, other = channel_norm_variance(x, y, weight, bits=bits, seed=value, eps=EPS, groups=groups)
        stated.append(one.sum())
        stated_sums.append(other.sum())
        torch.testing.assert_close(found.bias.double(), dbeta, rtol=1e-5, atol=1e-5 * float(y.abs().sum((0, 2)).max()))
    for error, gradient, variances in ((errors, dx, stated), (sums, dgamma, stated_sums)):
        error, variance = torch.stack(error), torch.stack(variances)
        assert abs(float(z_scores((error * gradient).flatten(1).sum(1)))) < Z
        assert draws * float(error.mean(0).square().sum() / variance.mean()) < Z**2
        excess = error.square().flatten(1).sum(1) / variance - 1  # of a draw, by the closed form for its scales
        spread = Simulation(1 + float(excess.mean()), float(excess.std()) / math.sqrt(draws), draws)
        assert_variance(spread, 1.0, widest=0.3)


def bias_along(x, y, groups, bits=2):
    """z of the mean of ⟨dX̂ − dX, g⟩, the direction that one copy read twice is biased in."""
    weight = torch.ones(CHANNELS)
    dx = exact(x, y, weight, groups)[0]
    found = []
    for value in range(200):
        seed = torch.tensor([value])
        saved = channel_norms.pack_channels(x.unsqueeze(1), bits, seed, EPS, groups)
        gradients = channel_norms.channel_gradients(y.unsqueeze(1), saved, bits, seed, weight, groups)
        found.append(((gradients.x.squeeze(1).double() - dx) * y).sum())
    return float(z_scores(torch.stack(found)))


@pytest.mark.parametrize("kind", [pytest.param("batch", marks=pytest.mark.thorough), "group"])
def test_the_mean_is_exact_because_the_variance_of_the_copy_is_taken_out(kind):
    """Of sets with few elements, at 2 bits; the same test fails by far for the formula without it."""
    x, y, _ = data(6)
    y = y.sign()
    assert abs(bias_along(x, y, KINDS[kind])) < Z
    with mock.patch.object(channel_norms, "scales_of", lambda scales: torch.zeros(scales.shape)):
        assert bias_along(x, y, KINDS[kind]) < -Z


@pytest.mark.parametrize("kind", KINDS)
def test_both_layouts_are_unbiased(kind):
    """Channels side by side, whose groups are of other elements."""
    groups, (x, y, weight) = KINDS[kind], data(20)
    *expected, of_bias = exact(x, y, weight, groups)
    found = [draw(x, y, weight, 3, groups, value, is_last=True) for value in range(60)]
    for one, wanted in zip(list(zip(*found, strict=True))[:2], expected, strict=True):
        errors = torch.stack(one).double() - wanted
        assert abs(float(z_scores((errors * wanted).flatten(1).sum(1)))) < Z
        assert 60 * float(errors.mean(0).square().sum()) < Z**2 * float(errors.square().flatten(1).sum(1).mean())
    torch.testing.assert_close(found[0].bias.double(), of_bias, rtol=1e-5, atol=1e-5 * float(y.abs().sum((0, 2)).max()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_channel_far_from_zero_is_as_precise(kind):
    """Statistics are sums of differences: a mean of 10,000 standard deviations costs nothing but x's own digits."""
    x, y, weight = data(80)
    if kind == "group":
        x = x - x.mean((0, 2), keepdim=True)
    far = (x + 1e4).double()
    for is_last in (False, True):
        found = draw(far.float(), y, weight, 8, KINDS[kind], 3, is_last)
        expected = exact(far.float(), y, weight, KINDS[kind])
        assert float((found.x - expected[0]).norm() / expected[0].norm()) < 0.02
