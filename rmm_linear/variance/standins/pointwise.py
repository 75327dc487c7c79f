"""Variance that derivatives in few bits add, exactly.

With dX̂ = dY ∘ ĝ and ĝ − g'(x) uniform on ± step / 2, see :mod:`rmm_linear.packing.derivatives`,

    E‖dX̂ − dX‖² = step² / 12 · ‖dY‖²_F

for every x. The layer below has the input gradient of the activation as the gradient Y of its output. Of its weight
gradient Σ_i dx̂_i ⊗ x_i, the errors of two rows are independent, so

    E‖dŴ − dW‖² = step² / 12 · Σ_i ‖x_i‖² ‖dy_i‖²

which is d of this layer's input and the gradient by the activation's output. ReLU and LeakyReLU add nothing. ReLU²
saves relu(x) in rotated groups, of which dX̂ = 2 dY ∘ relu(x)^; rotated back, every element of a group has the
variance scale² / 12, so its share of both sums is 4 · scale² / 12 · dY²_ij instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rmm_linear import packing
from rmm_linear.packing.pointwise import Pointwise


def element_variance(
    function: Pointwise, bits: int, scales: Tensor | None = None, columns: int | None = None
) -> Tensor:
    """Return the variance of the stored derivative of one element.

    Args:
        function: The function.
        bits: Bits per element, as :meth:`Pointwise.bits` returns them.
        scales: Of ReLU², of every stored group, uint8, shape (n, ⌈C / 64⌉).
        columns: C, of ReLU².

    Returns:
        step² / 12, float64: a scalar, or of shape (n, C) for ReLU².

    Raises:
        ValueError: If ReLU² comes without its scales and columns.

    Example:
        >>> round(float(element_variance(Pointwise("tanh"), 2)), 5)  # steps of 1/3
        0.00926
    """
    if function.is_exact:
        return torch.zeros((), dtype=torch.float64)
    if function.is_bounded:
        return torch.tensor(function.step(bits), dtype=torch.float64).square() / 12
    if scales is None or columns is None:
        raise ValueError("The variance of relu_squared follows from stored scales: give scales and columns.")
    return 4 * packing.element_variance(scales, columns)


def input_gradient_variance(y: Tensor, variance: Tensor) -> Tensor:
    """Return E‖dX̂ − dX‖² of an activation.

    Args:
        y: dY, the gradient by its output, shape (n, C); of padding it has no row, or zeros.
        variance: Result of :func:`element_variance`.

    Returns:
        float64, a scalar.
    """
    return (y.double().square() * variance.to(y.device)).sum()


def weight_gradient_variance(x: Tensor, y: Tensor, variance: Tensor) -> Tensor:
    """Return E‖dŴ − dW‖² of the linear layer whose output the activation reads.

    Args:
        x: Input of the linear layer, shape (n, I).
        y: dY, the gradient by the activation's output, shape (n, C).
        variance: Result of :func:`element_variance`.

    Returns:
        float64, a scalar: what the activation adds; the sketch of the layer itself adds its own.
    """
    rows = (y.double().square() * variance.to(y.device)).sum(1)
    return x.double().square().sum(1) @ rows
