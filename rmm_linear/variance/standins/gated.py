"""Variance of the gradients of a gated MLP whose products are packed.

da = y · p and db = y · s, with p = b · act'(a) and s = act(a) packed in rotated groups, see
:mod:`rmm_linear.packing.gated`. The errors of the elements of a group are uncorrelated, each with the variance
scale² / 12, and stay so when the rotation is undone. A gradient multiplies them by y afterwards, so

    E‖da^ − da‖² = Σ over rows i and columns j of y_ij² · scale(i, group of j)² / 12

and the same for db, with the scales of s. Exact given the seeds, from what is stored alone.
"""

from __future__ import annotations

from torch import Tensor

from rmm_linear._support.autocast import without_autocast
from rmm_linear.ops.gated import PACK_GATED
from rmm_linear.packing import element_variance


@without_autocast
def product_variance(grad_output: Tensor, scales: Tensor) -> Tensor:
    """Return E‖y · p^ − y · p‖² for a packed matrix p.

    Args:
        grad_output: y, shape (N, C).
        scales: Of every group of p, uint8, shape (N, ⌈C / 64⌉), as :func:`rmm_linear.packing.pack` returns them.

    Returns:
        float64, shape (), in squared units of the gradient.

    Example:
        >>> import torch
        >>> y, scales = torch.ones(1, 3), torch.tensor([[161]], dtype=torch.uint8)
        >>> product_variance(y, scales)  # 3 · 2² / 12
        tensor(1., dtype=torch.float64)
    """
    return (grad_output.double().square() * element_variance(scales, grad_output.shape[1])).sum()


def gated_variance(
    a: Tensor, b: Tensor, grad_output: Tensor, *, activation: str, bits: int, seeds: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the variances of the gradients with respect to a and b of act(a) · b.

    Args:
        a: The gate's output, shape (N, C).
        b: What act(a) is multiplied by, shape (N, C).
        grad_output: y, the gradient with respect to act(a) · b, shape (N, C).
        activation: Name of act, one of :data:`rmm_linear.packing.gated.ACTIVATIONS`.
        bits: 8, 4, 3 or 2.
        seeds: int64, shape (2,). They decide the rotations, and with them the scales.

    Returns:
        E‖da^ − da‖² and E‖db^ − db‖², float64, shape (), given the rotations.

    Example:
        >>> import torch
        >>> a = b = y = torch.ones(2, 64)
        >>> da, db = gated_variance(a, b, y, activation="relu", bits=4, seeds=torch.tensor([1, 2]))
        >>> bool(0.5 < da < 4), bool(0.5 < db < 4)  # 128 elements, with steps of about 1/3
        (True, True)
    """
    packed = PACK_GATED(a, b, seeds, activation, bits, (True, True), None)
    first, second = (product_variance(grad_output, scales) for _, scales in packed)
    return first, second
