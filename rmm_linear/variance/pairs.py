"""What every closed form takes: X and Y of one layer, or of several layers of one shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rmm_linear.checks import check_integer, check_kind
from rmm_linear.sketches import FAMILIES


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


def check_sketch(x: Tensor, *, kind: str, rows: int, block: int | None, mask: Tensor | None) -> None:
    """Refuse what says no sketch of x: formulas and simulations take the same.

    Args:
        x: Layer input, shape (N, I) or (L, N, I).
        kind: One of :data:`rmm_linear.sketches.KINDS`.
        rows: K.
        block: Tokens per block, or None.
        mask: True for tokens that count, shape (N,), or None.

    Raises:
        ValueError: If an argument is out of range, ``block`` is given to a kind without blocks, or ``mask`` has another
            shape than (N,).
    """
    check_kind(kind)
    check_integer("rows", rows)
    check_integer("block", block, optional=True)
    if block is not None and not FAMILIES[kind].blocks:
        raise ValueError(f"block is for kinds with blocks, got block={block} with kind={kind!r}. Use block=None.")
    if mask is not None and mask.shape != x.shape[-2:-1]:
        raise ValueError(f"mask must have the shape ({x.shape[-2]},) of the rows of x, got {tuple(mask.shape)}.")


def over_layers(closed_form: Callable[[Tensor, Tensor], Tensor], x: Tensor, grad_output: Tensor) -> Tensor:
    """Apply a closed form to every layer, one after the other: layers share no work, and memory is that of one.

    Args:
        closed_form: Takes X (N, I) and Y (N, O), returns a float64 scalar.
        x: Layer input, shape (N, I) or (L, N, I).
        grad_output: Gradient by the layer's output, shape (N, O) or (L, N, O).

    Returns:
        float64, shape () or (L,).
    """
    check_pair(x, grad_output)
    x, grad_output = x.detach(), grad_output.detach()
    if x.dim() == 2:
        return closed_form(x, grad_output)
    values = [closed_form(a, b) for a, b in zip(x, grad_output, strict=True)]
    return torch.stack(values) if values else x.new_zeros(0, dtype=torch.float64)
