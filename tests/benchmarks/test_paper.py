"""The published layer that others are compared with: its gradients, also where a forward pass runs twice."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.paper import PaperLinear, use_paper


def test_the_published_layer_without_bias_and_with_more_dimensions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8, bias=False))
    x = torch.randn(5, 7, 16, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    use_paper(model, 0.2)
    model(x).sum().backward()
    layer = model[0]
    assert isinstance(layer, PaperLinear)
    assert layer.weight.grad is not None
    assert layer.weight.grad.shape == (8, 16)
    assert x.grad is not None
    assert torch.equal(x.grad, expected)
    with torch.no_grad():
        assert model(x).shape == (5, 7, 8)


def test_the_published_layer_is_unbiased_under_checkpointing() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(16, 8)), torch.randn(64, 16), torch.randn(64, 8)
    exact = y.T @ x
    use_paper(model, 0.5)
    layer = model[0]
    assert isinstance(layer, PaperLinear)
    found = []
    for _ in range(100):
        layer.weight.grad = None
        checkpoint(model, x, use_reentrant=False).backward(y)
        assert layer.weight.grad is not None
        found.append(float((layer.weight.grad * exact).sum() / exact.square().sum()))
    # With another step's S in the backward pass, it would be 0.
    assert statistics.mean(found) == pytest.approx(1, abs=4 * statistics.stdev(found) / 10)
    assert statistics.stdev(found) < 1
