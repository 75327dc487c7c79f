"""Pointwise functions and their derivatives: what an activation module computes, and what its backward pass needs.

The gradient by the input of y = g(x) is dX = dY ∘ g'(x), so g'(x) is all that the backward pass needs of x. It lies in
a range [low, high] that is known beforehand, whatever x is, for every function here but the square of ReLU. Ranges
are rounded outwards, so that a derivative computed in float32 lies inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

_MARGIN = 2.0**-18  # relative margin of a step, so that a rounded sum of step and noise never exceeds the last code
_FAR = 1024.0  # beyond it every derivative has reached its limit; the formulas need a finite x


@dataclass(frozen=True)
class Pointwise:
    """A function that is applied to every element."""

    name: str
    # (α,) of "elu", (slope,) of "leaky_relu", (least, most) of "hardtanh"; () for the others
    parameters: tuple[float, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the function to floating-point numbers."""
        return FUNCTIONS[self.name].value(x, *self.parameters)

    def derivative(self, x: Tensor) -> Tensor:
        """Compute g'(x) of float32 or float64. At a jump of g' it is what PyTorch's backward pass takes.

        NaN counts as −∞, and whoever stores the derivative notes that there is one, unless it is exact in one bit: then
        that of NaN is PyTorch's. Of ±∞ it is the limit, where PyTorch's formulas may give NaN.
        """
        if not self.is_exact and self.is_bounded:
            x = x.nan_to_num(-_FAR).clamp(-_FAR, _FAR)
        return FUNCTIONS[self.name].derivative(x, *self.parameters)

    @property
    def is_exact(self) -> bool:
        """Whether g' has two values, one of which is 1, so that one bit says all."""
        return self.name in ("relu", "leaky_relu", "hardtanh")

    @property
    def is_bounded(self) -> bool:
        """Whether g' has a finite range."""
        return self.name != "relu_squared"

    @property
    def range(self) -> tuple[float, float]:
        """The interval [low, high] that holds g'(x) for every x; infinite where there is none."""
        if self.name == "elu":
            (alpha,) = self.parameters
            return min(0.0, alpha), max(1.0, alpha)
        if self.name == "leaky_relu":
            (slope,) = self.parameters
            return min(1.0, slope), max(1.0, slope)
        return FUNCTIONS[self.name].range

    def bits(self, wanted: int) -> int:
        """Return the width of the stored derivative: 1 where that is exact, at least 2 for ReLU², else ``wanted``."""
        return 1 if self.is_exact else wanted if self.is_bounded else max(2, wanted)

    def step(self, bits: int) -> float:
        """Return the distance of two codes: the range is cut into 2^bits − 1 parts."""
        low, high = self.range
        return (high - low) * (1 + _MARGIN) / (2**bits - 1)


@dataclass(frozen=True)
class PointwiseFamily:
    """The functions of a name in :data:`FUNCTIONS`: g, g' for finite x, and g's range with the default parameters."""

    value: Callable[..., Tensor]
    derivative: Callable[..., Tensor]
    range: tuple[float, float]


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


# ½ (1 + tanh u) = sigmoid(2u), which loses no digits where tanh u is near −1.
_TWICE, _CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715


def _gelu_tanh_value(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x * (_TWICE + _CUBIC * _TWICE * x * x))


def _gelu_tanh(x: Tensor) -> Tensor:
    s = torch.sigmoid(x * (_TWICE + _CUBIC * _TWICE * x * x))
    return s + x * (_TWICE + 3 * _CUBIC * _TWICE * x * x) * (s * (1 - s))


def _silu(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def _mish(x: Tensor) -> Tensor:
    t = torch.tanh(F.softplus(x))
    return t + x * (1 - t * t) * torch.sigmoid(x)


def _hardswish(x: Tensor) -> Tensor:
    return torch.where(x <= -3, 0, torch.where(x >= 3, 1, x / 3 + 0.5))


def _sigmoid(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


def _elu(x: Tensor, alpha: float) -> Tensor:
    return torch.where(x > 0, 1, alpha * torch.exp(x.clamp(max=0)))


def _relu(x: Tensor) -> Tensor:
    return torch.where(x <= 0, 0, torch.ones_like(x))


def _leaky_relu(x: Tensor, slope: float) -> Tensor:
    return torch.where(x > 0, torch.ones_like(x), slope)


def _hardtanh(x: Tensor, least: float, most: float) -> Tensor:
    # Of NaN, vectors of PyTorch take 0, and scalars 1.
    return torch.where((x > least) & (x < most), torch.ones_like(x), 0)


FUNCTIONS: dict[str, PointwiseFamily] = {
    "gelu": PointwiseFamily(F.gelu, _gelu, (-0.129, 1.129)),
    "gelu_tanh": PointwiseFamily(_gelu_tanh_value, _gelu_tanh, (-0.1292, 1.1292)),
    "silu": PointwiseFamily(F.silu, _silu, (-0.0999, 1.0999)),
    "quick_gelu": PointwiseFamily(
        lambda x: x * torch.sigmoid(1.702 * x), lambda x: _silu(1.702 * x), (-0.0999, 1.0999)
    ),
    "mish": PointwiseFamily(F.mish, _mish, (-0.1126, 1.0886)),
    "hardswish": PointwiseFamily(F.hardswish, _hardswish, (-0.5, 1.5)),
    "sigmoid": PointwiseFamily(torch.sigmoid, _sigmoid, (0.0, 0.25)),
    "tanh": PointwiseFamily(torch.tanh, lambda x: 1 - torch.tanh(x).square(), (0.0, 1.0)),
    "elu": PointwiseFamily(F.elu, _elu, (0.0, 1.0)),
    "relu": PointwiseFamily(F.relu, _relu, (0.0, 1.0)),
    "leaky_relu": PointwiseFamily(F.leaky_relu, _leaky_relu, (0.01, 1.0)),
    "hardtanh": PointwiseFamily(F.hardtanh, _hardtanh, (0.0, 1.0)),
    "relu_squared": PointwiseFamily(lambda x: F.relu(x).square(), lambda x: 2 * F.relu(x), (0.0, math.inf)),
}
