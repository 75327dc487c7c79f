"""D²_SGD against brute force and drawn batches; the ratio for a target, and the batch that a noise is worth."""

import math

import pytest
import torch
from cases import every_sampler
from helpers import heavy_tailed
from statistical import ROWS, TOKENS, assert_variance, counterexample, padded

from rmm_linear.sketches import KINDS
from rmm_linear.variance import effective_batch, required_ratio, sgd_variance, simulate_sgd_variance, sketch_variance

RAGGED = torch.tensor([4] * 3 + [0] * 20 + [9] + [4] * 10 + [-2] * 8)  # 4 sequences; one of them in two places


def brute_sgd(x, y, samples):
    gradients = torch.stack([y[samples == s].T @ x[samples == s] for s in samples.unique()])
    return len(gradients) * gradients.var(dim=0, unbiased=True).sum()


@pytest.mark.parametrize("samples", [None, (6, 7), (42, 1), (2, 21), RAGGED], ids=str)
def test_sgd_variance_is_the_sample_variance_of_the_gradients(samples):
    x, y = heavy_tailed(42, 5, 3)
    batch, length = samples if isinstance(samples, tuple) else (42, 1)
    owners = samples if isinstance(samples, torch.Tensor) else torch.arange(batch).repeat_interleave(length)
    torch.testing.assert_close(sgd_variance(x, y, samples=samples), brute_sgd(x, y, owners), rtol=1e-10, atol=0)


def test_sgd_variance_over_sequences_is_that_of_per_example_gradients():
    """The same with the lengths of the sequences told apart: padded rows carry no gradient."""
    torch.manual_seed(0)
    weight = torch.randn(3, 5, dtype=torch.float64)
    x = torch.randn(6, 7, 5, dtype=torch.float64)
    real = torch.arange(7) < torch.tensor([7, 3, 5, 1, 7, 4]).unsqueeze(1)

    def loss(weight, x, real):
        return (torch.tanh(x @ weight.T) * real.unsqueeze(1)).mean(0).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weight, x, real)
    brute = 6 * gradients.var(dim=0).sum()
    output = (x @ weight.T).requires_grad_()
    (torch.tanh(output) * real.unsqueeze(2)).mean(1).square().sum().backward()
    y = output.grad.flatten(0, 1)
    found = sgd_variance(x.flatten(0, 1), y, samples=(6, 7))
    torch.testing.assert_close(found, brute, rtol=1e-10, atol=0)
    keep = real.flatten()
    owners = torch.arange(6).repeat_interleave(7)[keep]
    ragged = sgd_variance(x.flatten(0, 1)[keep], y[keep], samples=owners)
    torch.testing.assert_close(ragged, brute, rtol=1e-10, atol=0)


def test_rows_without_a_gradient_count_as_tokens_and_not_in_sequences():
    x, y = counterexample()
    padded_x, padded_y = torch.cat((x, torch.ones(4, 1))), torch.cat((y, torch.zeros(4, 1)))
    assert sgd_variance(x, y) == 0
    assert float(sgd_variance(padded_x, padded_y)) == pytest.approx(1.6)
    owners = torch.tensor([0, 1, 0, 0, 1, 1])
    assert sgd_variance(padded_x, padded_y, samples=owners) == sgd_variance(x, y, samples=owners[:2]) == 0


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_layer_with_few_outputs_is_summed_without_a_loop_over_its_tokens(outputs):
    x, y = heavy_tailed(2_000, 6, outputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = sgd_variance(x, y)
    assert sum(event.count for event in profile.key_averages()) < 200
    torch.testing.assert_close(found, brute_sgd(x, y, torch.arange(2_000)), rtol=1e-10, atol=0)


def test_one_gradient_for_all_samples_is_no_noise_at_all():
    x, y = torch.full((3000, 4), 0.1), torch.full((3000, 2), 0.3)
    assert sgd_variance(x, y, samples=(30, 100)) == pytest.approx(0, abs=1e-6)
    assert sgd_variance(x, y, samples=(30, 100)) >= 0


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ((2, 2), r"samples must be \(batch, sequence\) and multiply to the 6 rows of x, got \(2, 2\)"),
        ((6,), r"samples must be \(batch, sequence\) and multiply to the 6 rows of x, got \(6,\)"),
        ((1, 6), "at least two of them, got 1"),
        (torch.zeros(6, dtype=torch.int64), "at least two of them, got 1"),
        (torch.zeros(5, dtype=torch.int64), r"each of the 6 rows of x, got torch.int64 of shape \(5,\)"),
        (torch.zeros(6), r"samples must be int64 .*, got torch.float32"),
    ],
)
def test_wrong_samples_are_refused(samples, message):
    x = torch.randn(6, 2)
    for function in (sgd_variance, simulate_sgd_variance):
        with pytest.raises(ValueError, match=message):
            function(x, x, samples=samples)


@pytest.mark.parametrize(
    ("draws", "widest"), [(5_000, 0.03), pytest.param(100_000, 0.006, marks=pytest.mark.montecarlo)]
)
@pytest.mark.parametrize("samples", [None, (10, 4), RAGGED[:TOKENS]], ids=str)
def test_sgd_variance_is_that_of_drawn_batches(samples, draws, widest):
    x, y, _ = padded()
    found = simulate_sgd_variance(x, y, samples=samples, draws=draws)
    assert_variance(found, sgd_variance(x, y, samples=samples), widest=widest)


# Targets


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_required_ratio_is_quiet_enough_and_one_row_less_is_not(kind, bits, masked):
    x, y, mask = padded()
    given = {"kind": kind, "bits": bits, "mask": mask if masked else None}
    limit = 1.5 * float(sgd_variance(x, y, samples=(10, 4)))
    rows = float(required_ratio(x, y, target=1.5, samples=(10, 4), **given)) * TOKENS
    assert rows == pytest.approx(round(rows))
    assert float(sketch_variance(x, y, rows=round(rows), **given)) <= limit
    assert round(rows) > 1
    assert float(sketch_variance(x, y, rows=round(rows) - 1, **given)) > limit


@every_sampler
def test_the_ratio_for_a_target_goes_by_the_probabilities(kind):
    x, y, mask = padded()
    given = {"kind": kind, "mask": mask, "probabilities": y.norm(dim=1) * x.norm(dim=1) + 0.01}
    limit = 0.5 * float(sgd_variance(x, y))
    rows = round(TOKENS * float(required_ratio(x, y, bits=None, target=0.5, **given)))
    assert float(sketch_variance(x, y, rows=rows, **given)) <= limit
    assert float(sketch_variance(x, y, rows=rows - 1, **given)) > limit
    assert rows < TOKENS * float(required_ratio(x, y, bits=None, target=0.5, kind=kind, mask=mask))


def test_required_ratio_says_when_no_ratio_suffices():
    """Rounding remains when every row is stored; without it, storing every row is exact."""
    x, y, mask = padded()
    assert required_ratio(x, y, kind="rows", bits=2, target=1e-6) == math.inf
    assert required_ratio(x, y, kind="rows", bits=None, target=1e-9) == 1
    masked = required_ratio(x, y, kind="rows", bits=None, target=1e-9, mask=mask)
    assert float(masked) * TOKENS == int(mask.sum())  # as soon as all tokens that count are stored
    x, y = counterexample()
    assert required_ratio(x, y, kind="gaussian", bits=None, target=1.0) == 1  # no minibatch noise to hide behind
    with pytest.raises(ValueError, match="target must be positive, got 0"):
        required_ratio(x, y, kind="rows", bits=None, target=0)


@pytest.mark.parametrize(("kind", "masked"), [("rademacher", True), ("hadamard", False), ("countsketch", False)])
def test_required_ratio_finds_a_quiet_ratio_below_rows_that_are_stored_as_they_are(kind, masked):
    """In 1 bit the noise is not monotone: where tokens are long in X and Y at once, storing all of them is louder."""
    generator = torch.Generator().manual_seed(20)
    length = torch.exp(1.2 * torch.randn(64, 1, generator=generator, dtype=torch.float64))
    x = torch.randn(64, 64, generator=generator, dtype=torch.float64) * length
    y = torch.randn(64, 4, generator=generator, dtype=torch.float64) * length
    mask = torch.arange(64) % 4 > 0 if masked else torch.ones(64, dtype=torch.bool)
    y *= mask.unsqueeze(1)
    given = {"kind": kind, "bits": 1, "mask": mask if masked else None}
    sgd = float(sgd_variance(x, y, samples=(16, 4)))
    noises = [float(sketch_variance(x, y, rows=rows, **given)) / sgd for rows in range(1, 65)]
    for share in (0.3, 0.7, 1.5):
        target = min(noises) + share * (noises[-1] - min(noises))
        quiet = [rows for rows, noise in enumerate(noises, start=1) if noise <= target]
        found = round(64 * float(required_ratio(x, y, target=target, samples=(16, 4), **given)))
        assert found in quiet
        assert found - 1 not in quiet
        assert found <= quiet[0] + 8  # the rounding term of a few seeds wavers from K to K
    if kind != "countsketch":  # most rows of which hold few tokens long before
        assert min(noises) < 0.85 * noises[-1]


def test_effective_batch_has_the_noise_of_both_together():
    x, y, _ = padded()
    sgd, sketch = sgd_variance(x, y, samples=(10, 4)), sketch_variance(x, y, kind="countsketch", rows=ROWS)
    batch = effective_batch(10, sketch / sgd)
    torch.testing.assert_close(sgd * 10 / batch, sgd + sketch)
    assert effective_batch(10, 0.0) == 10
    assert effective_batch(10, math.inf) == 0
    for noise in (-1, torch.tensor([0.5, -0.1])):
        with pytest.raises(ValueError, match="noise must not be negative"):
            effective_batch(8, noise)
    with pytest.raises(ValueError, match="batch must be at least 1 sample, got 0"):
        effective_batch(0, 1.0)
