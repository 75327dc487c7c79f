"""D²_SGD against brute force and drawn batches: over tokens, over sequences, and over samples of any lengths."""

import pytest
import torch
from helpers import heavy_tailed
from statistical import TOKENS, assert_variance, counterexample, padded

from rmm_linear.variance import sgd_variance, simulate_sgd_variance

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


@pytest.mark.parametrize("samples", [None, (10, 4), RAGGED[:TOKENS]], ids=str)
def test_sgd_variance_is_that_of_drawn_batches(samples):
    x, y, _ = padded()
    found = simulate_sgd_variance(x, y, samples=samples, draws=5_000)
    assert_variance(found, sgd_variance(x, y, samples=samples), widest=0.03)


@pytest.mark.montecarlo
@pytest.mark.parametrize("samples", [None, (10, 4), RAGGED[:TOKENS]], ids=str)
def test_sgd_variance_is_that_of_drawn_batches_heavy(samples):
    x, y, _ = padded()
    found = simulate_sgd_variance(x, y, samples=samples, draws=100_000)
    assert_variance(found, sgd_variance(x, y, samples=samples), widest=0.006)
