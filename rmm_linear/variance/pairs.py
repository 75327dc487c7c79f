"""What every closed form takes: X and Y of one layer, or of several layers of one shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rmm_linear.sketches import SAMPLERS


def check_pair(x: Tensor, grad_output: Tensor) -> None:
    """Refuse what is not the input and the output gradient of one layer, or of a batch of layers.

    Args:
        x: Layer input, shape (N, I) or (L, N, I).
        grad_output: Gradient by the layer's output, shape (N, O) or (L, N, O).

    Raises:
        ValueError: If the shapes do not belong together.
        TypeError: If one of the two is not floating point.
    """
    if x.dim() not in (2, 3) or x.shape[:-1] != grad_output.shape[:-1]:
        raise ValueError(
            "x must have the shape (N, I) and grad_output (N, O), or (L, N, I) and (L, N, O) for L layers, "
            f"got {tuple(x.shape)} and {tuple(grad_output.shape)}. Flatten batch and sequence: x.flatten(0, -2)."
        )
    for name, tensor in (("x", x), ("grad_output", grad_output)):
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {tensor.dtype}. Use {name}.float().")


def check_probabilities(p: Tensor | None, x: Tensor, kind: str) -> None:
    """Refuse what are no probabilities of the rows of x, or nothing that the kind draws rows by.

    Args:
        p: Probabilities, up to a factor, or None.
        x: Layer input, shape (N, I) or (L, N, I).
        kind: One of :data:`rmm_linear.sketches.KINDS`.

    Raises:
        ValueError: If they are refused.
        TypeError: If they are not floating point.
    """
    if p is None:
        return
    if kind not in SAMPLERS:
        raise ValueError(f"probabilities are for {' and '.join(SAMPLERS)}, got kind={kind!r}. Use probabilities=None.")
    if not p.is_floating_point():
        raise TypeError(f"probabilities must be floating point, got {p.dtype}. Use probabilities.double().")
    if p.shape != x.shape[:-1]:
        raise ValueError(
            f"probabilities must have the shape {tuple(x.shape[:-1])} of the rows of x, got {tuple(p.shape)}."
        )
    if not bool((p >= 0).all() & p.isfinite().all()):
        raise ValueError("probabilities must be finite and not negative. Where a token is not to be drawn, use mask.")


def over_layers(closed_form: Callable[..., Tensor], x: Tensor, grad_output: Tensor, p: Tensor | None = None) -> Tensor:
    """Apply a closed form to every layer, one after the other: layers share no work, and memory is that of one.

    Args:
        closed_form: Takes X (N, I) and Y (N, O), and p (N,) where it is given, returns a float64 scalar.
        x: Layer input, shape (N, I) or (L, N, I).
        grad_output: Gradient by the layer's output, shape (N, O) or (L, N, O).
        p: Probabilities of the rows, shape (N,) or (L, N), or None.

    Returns:
        float64, shape () or (L,).
    """
    check_pair(x, grad_output)
    tensors = [tensor.detach() for tensor in (x, grad_output, p) if tensor is not None]
    if x.dim() == 2:
        return closed_form(*tensors)
    values = [closed_form(*layer) for layer in zip(*tensors, strict=True)]
    return torch.stack(values) if values else x.new_zeros(0, dtype=torch.float64)
