"""What the tests of packed norms share: norms, data with long rows, and the exact gradients."""

from __future__ import annotations

import copy

import torch
from helpers import heavy_tailed
from torch import Tensor, nn

from rmm_linear.activations.base import packed_class
from rmm_linear.activations.norm import PackedNorm

EPS = 1e-5
ROWS = 12


def rows_of(columns: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """X with a mean, Y that depends on it, and a weight."""
    x, y = heavy_tailed(ROWS, columns, columns, dtype)
    return x + 0.5, 0.05 * y + 0.2 * x, torch.linspace(0.5, 1.5, columns, dtype=dtype)


def exact(x: Tensor, y: Tensor, weight: Tensor, centered: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dX, dγ and dβ by autograd, in float64."""
    x, weight = (part.detach().double().clone().requires_grad_() for part in (x, weight))
    bias = torch.zeros_like(weight, requires_grad=True)
    shift = x.mean(1, keepdim=True) if centered else 0
    h = (x - shift) * ((x - shift).square().mean(1, keepdim=True) + EPS).rsqrt()
    dx, dgamma, dbeta = torch.autograd.grad(h * weight + bias, (x, weight, bias), y.double())
    return dx, dgamma, dbeta


def packed(module: nn.Module, config: object = None) -> nn.Module:
    """A packed copy of a module that shares nothing with it."""
    module = copy.deepcopy(module).train()
    module.__class__ = packed_class(PackedNorm, type(module))
    module._set_up(config)
    return module


WIDTH = 96
NORMS = {
    "layer": lambda: nn.LayerNorm(WIDTH),
    "rms": lambda: nn.RMSNorm(WIDTH),
    "no bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "no affine": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "two dimensions": lambda: nn.LayerNorm((6, 16)),
}


class Bits:
    """A configuration of which nothing else is read."""

    def __init__(self, bits, fused=False):
        self.norm_bits, self.mask_padding, self.checkpointed, self.fused = bits, True, "packed", fused


def fresh(name="layer"):
    module = NORMS[name]()
    for parameter in module.parameters():
        nn.init.normal_(parameter, 1.0, 0.3)
    return module


def batch(name="layer", dtype=torch.float32, length=10):
    generator = torch.Generator().manual_seed(length)
    shape = (3, length, 6, 16) if name == "two dimensions" else (3, length, WIDTH)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def gradients(module, x, y):
    inputs = [x, *module.parameters()]
    output = module(x)
    return output, torch.autograd.grad(output, inputs, y.to(output.dtype))


def error(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def fresh_like(module):
    exact = nn.LayerNorm(WIDTH)
    exact.load_state_dict(module.state_dict())
    return exact
