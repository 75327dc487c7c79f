"""Variance of the weight gradient of a convolution whose input is saved in few bits.

dW is linear in the input, and the errors of its elements are uncorrelated, each with the variance v = scale² / 12 of
its group, see :mod:`rmm_linear.packing.pack`. Every element of dW is a sum of products of x and y, of which the errors'
variances add up:

    Var(dW) = the gradient that the weight would have from the input v and the output's gradient y²

Exact given the rotations, from what is stored alone, with padding by zeros: other padding repeats elements with the
same error.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rmm_linear._support.autocast import without_autocast
from rmm_linear.activations.convolution import ConvolutionForm
from rmm_linear.ops.sketches import PACK
from rmm_linear.packing import element_variance


@without_autocast
def convolution_variance(module: nn.Module, input: Tensor, grad_output: Tensor, *, bits: int, seed: Tensor) -> Tensor:
    """Return the variance of every element of a convolution's weight gradient.

    Args:
        module: ``nn.Conv1d``, ``Conv2d`` or ``Conv3d``, or a transposed one, with ``padding_mode="zeros"``.
        input: Shape (N, C, *) or (C, *).
        grad_output: y, the gradient with respect to the output.
        bits: Of the code: 8, 4 or 3.
        seed: int64, shape (1,). It decides the rotations, and with them the scales.

    Returns:
        E[(dW^ − dW)²], float64, in the shape of the weight.

    Raises:
        ValueError: If the module pads by something else than zeros, or for another width.

    Example:
        >>> import torch
        >>> x, y = torch.randn(1, 2, 8, 8), torch.ones(1, 3, 6, 6)
        >>> convolution_variance(nn.Conv2d(2, 3, 3), x, y, bits=4, seed=torch.tensor([0])).shape
        torch.Size([3, 2, 3, 3])
    """
    given: Any = module
    if given.padding_mode != "zeros":
        raise ValueError(f"padding_mode must be 'zeros', got {given.padding_mode!r}, which repeats elements.")
    if bits not in (8, 4, 3):
        raise ValueError(
            f"bits must be 8, 4 or 3, got {bits!r}: of the codes below, the variance follows from the input."
        )
    more = given.output_padding if given.transposed else None
    form = ConvolutionForm.of(given, input, more, None, bits)
    scales = PACK(form.layout.matrix(input.detach()), bits, seed)[1]
    variances = form.layout.tensor(element_variance(scales, form.layout.columns))
    squares = grad_output.double().square()
    found = form.gradients(squares, variances, given.weight.detach().double(), (False, True, False))[1]
    if found is None:
        raise TypeError(f"{type(module).__name__} has no gradient of its weight.")
    return found
