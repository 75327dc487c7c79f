"""D²_SGD against brute force, and D²_sketch against the package's own formulas."""

import pytest
import torch
from helpers import heavy_tailed

from rmm_linear.variance import sgd_variance, sketch_variance


@pytest.mark.parametrize("samples", [None, (6, 7), (42, 1), (2, 21)])
def test_sgd_variance_is_the_sample_variance_of_the_gradients(samples):
    x, y = heavy_tailed(42, 5, 3)
    batch, length = samples or (42, 1)
    gradients = torch.stack([b.T @ a for a, b in zip(x.split(length), y.split(length), strict=True)])
    brute = batch * gradients.var(dim=0, unbiased=True).sum()
    torch.testing.assert_close(sgd_variance(x, y, samples=samples), brute, rtol=1e-10, atol=0)


def test_sgd_variance_over_sequences_is_that_of_per_example_gradients():
    torch.manual_seed(0)
    weight = torch.randn(3, 5, dtype=torch.float64)
    x = torch.randn(6, 7, 5, dtype=torch.float64)

    def loss(weight, x):
        return torch.tanh(x @ weight.T).mean(0).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x)
    brute = 6 * gradients.var(dim=0).sum()
    output = (x @ weight.T).requires_grad_()
    torch.tanh(output).mean(1).square().sum().backward()
    found = sgd_variance(x.flatten(0, 1), output.grad.flatten(0, 1), samples=(6, 7))
    torch.testing.assert_close(found, brute, rtol=1e-10, atol=0)


def test_the_published_bound_is_false():
    """Two tokens with the same gradient: no minibatch noise at all, and sketch noise for every K."""
    x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [0.5]])
    p, g = float(x.square().sum() * y.square().sum()), float((x.T @ y).square())
    assert float(sgd_variance(x, y)) == pytest.approx(0, abs=1e-12)
    assert p - g == pytest.approx(2.25)  # what the paper states for K times the sketch's variance
    assert float(sketch_variance(x, y, kind="gaussian", rows=1)) == pytest.approx(p + g)


def test_wrong_samples_are_refused():
    x = torch.randn(6, 2)
    with pytest.raises(ValueError, match=r"samples must multiply to the 6 rows of x, got 2 sequences of 2"):
        sgd_variance(x, x, samples=(2, 2))
    with pytest.raises(ValueError, match="at least two of them, got 1"):
        sgd_variance(x, x, samples=(1, 6))
