"""PyTorch's default device and dtype change nothing in what the C library reads and writes."""

from contextlib import contextmanager

import gated_helpers
import norm_helpers
import pointwise_helpers
import pytest
import torch
from torch import nn

from rmm_linear import RMMConfig, RMMLinear
from rmm_linear.activations.attention import scaled_dot_product_attention
from rmm_linear.activations.base import packed_class
from rmm_linear.activations.dropout import PackedDropout
from rmm_linear.backends import native
from rmm_linear.ops.native.derivatives import derivative_table

ROWS, WIDTH = 100, 16


class Attention(nn.Module):
    def forward(self, x):
        heads = x.view(2, 5, 10, WIDTH)
        return scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)


def dropout():
    module = nn.Dropout(0.5)
    module.__class__ = packed_class(PackedDropout, nn.Dropout)
    module._set_up(RMMConfig(checkpointed="packed"))
    return module


MODULES = {
    "linear": lambda: RMMLinear(WIDTH, 4),
    "norm": lambda: norm_helpers.packed(nn.LayerNorm(WIDTH), norm_helpers.Bits(4)),
    "gated": lambda: gated_helpers.packed(gated_helpers.made("llama"), context=False),
    "activation": lambda: pointwise_helpers.packed(nn.ELU(1.5)),
    "attention": Attention,
    "dropout": dropout,
}


@pytest.fixture(autouse=True)
def _compiled(monkeypatch):
    """These tests are of the C library, whatever the others are asked to run."""
    monkeypatch.delenv("RMM_BACKEND", raising=False)


@contextmanager
def default(value):
    """The default device or dtype is this one inside of the block."""
    before = torch.get_default_dtype()
    if isinstance(value, torch.dtype):
        torch.set_default_dtype(value)
    else:
        torch.set_default_device(value)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("value", ["meta", torch.float64, torch.float16], ids=str)
def test_outputs_and_gradients_stay_the_same(name, value):
    module, found = MODULES[name]().train(), []
    for given in ("cpu", value):
        derivative_table.cache_clear()
        x = pointwise_helpers.randn(ROWS, WIDTH, scale=2).requires_grad_()
        torch.manual_seed(3)
        with default(given):
            output = module(x)
            gradients = torch.autograd.grad(output.square().sum(), [x, *module.parameters()])
        found.append((output.detach(), *gradients))
    for one, other in zip(*found, strict=True):
        assert one.any()
        assert torch.equal(one, other)


def test_random_numbers_are_on_the_device_of_the_seed():
    seed, offset = torch.tensor([7]), torch.arange(3)
    with default("meta"):
        assert native.philox(seed, offset)[0].device.type == "cpu"
