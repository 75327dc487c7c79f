"""Modules with code of their own in the table of converted modules: elementwise, gated, products, convolutions."""

from __future__ import annotations

import math

import torch
from gated_helpers import HIDDEN
from torch import nn
from torch.nn import functional as F

OUTPUTS = 9


class Own(nn.Module):
    """An elementwise function that is known by no name."""

    def forward(self, x):
        return x * torch.sin(x).square()


class OwnParameter(nn.Module):
    """An elementwise function with a parameter of one element."""

    def __init__(self):
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor([0.7]))

    def forward(self, x):
        return torch.where(x > 0, x * x * F.softplus(self.alpha), x.sin())


class OwnGate(nn.Module):
    """A gated MLP with elementwise code of its own between its linear layers."""

    def __init__(self, width):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(width, 2 * HIDDEN), nn.Linear(HIDDEN, width, bias=False)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        gate = gate.clamp(max=2)
        return self.down_proj((up.clamp(-2, 2) + 1) * gate * torch.sigmoid(gate * 1.7))


class OwnProduct(nn.Module):
    """A product with a weight of its own, as routers of experts have it."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(OUTPUTS, width) / width**0.5),
            nn.Parameter(torch.ones(OUTPUTS)),
        )

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class OwnMatmul(nn.Module):
    """A product of matrices with a weight of its own, and one of two activations."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, OUTPUTS) / width**0.5)

    def forward(self, x):
        return x @ self.weight


class OwnScale(nn.Module):
    """Features by a scale for each, and the product of neighbours, by names of functions of all kinds."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        scaled = self.scale * x
        return scaled.mul(scaled.roll(1, -1))


class OwnClamp(nn.Module):
    """Clamps by names of both kinds."""

    def forward(self, x):
        return torch.clip(x.roll(1, -1).clamp(min=-0.5), -1, max=0.7)


class OwnDropout(nn.Module):
    """A dropout that is called as a function."""

    def forward(self, x):
        return F.dropout(x.roll(1, -1), 0.3, training=self.training)


class TurnedConvolution(nn.Conv2d):
    """A convolution whose weight is another view of its own."""

    def forward(self, input):
        weight = self.weight.transpose(2, 3)
        return nn.functional.conv2d(input, weight, self.bias, self.stride, self.padding, groups=self.groups)


class Images(nn.Module):
    """A convolution of rows, each of which is an image of four channels by itself."""

    def __init__(self, width, make, axes):
        super().__init__()
        self.size = ((4, width // 4), (4, 3, width // 12), (4, 1, 3, width // 12))[axes - 1]
        self.convolution = make(4, 6)

    def forward(self, x):
        rows = math.prod(x.shape[:-1])
        output = self.convolution(x.reshape(rows, *self.size) if x.dim() > 1 else x.view(self.size))
        return output.reshape(*x.shape[:-1], math.prod(output.shape[-len(self.size) :]))
