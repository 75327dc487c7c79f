"""Checks of the arguments of the closed forms and simulations, and their application to several layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rmm_linear._support.validation import check_integer
from rmm_linear.sketches import SAMPLERS, TokenMask, check_block, check_kind, probabilities, row_norms


def check_pair(x: Tensor, grad_output: Tensor) -> None:
    """Check that X, (N, I) or (L, N, I), and Y, (N, O) or (L, N, O), can belong to one layer, or to L layers."""
    if x.dim() not in (2, 3) or x.shape[:-1] != grad_output.shape[:-1]:
        raise ValueError(
            "x must have the shape (N, I) and grad_output (N, O), or (L, N, I) and (L, N, O) for L layers, "
            f"got {tuple(x.shape)} and {tuple(grad_output.shape)}. Flatten batch and sequence: x.flatten(0, -2)."
        )
    for name, tensor in (("x", x), ("grad_output", grad_output)):
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {tensor.dtype}. Use {name}.float().")


def sampling_probabilities(
    x: Tensor, kind: str, rows: int, weights: Tensor | None, mask: TokenMask | None
) -> Tensor | None:
    """Return the probabilities with which a kind samples the rows of x (N, I), float64 (N,), 0 for masked tokens.

    weights: Probabilities, up to a factor, shape (N,). None is ‖x‖ alone with the default ``uniform_mix``. None is
    returned if the kind samples no rows.
    """
    if weights is not None and kind not in SAMPLERS:
        raise ValueError(f"probabilities are for {' and '.join(SAMPLERS)}, got kind={kind!r}. Use probabilities=None.")
    if kind not in SAMPLERS or rows >= x.shape[0]:
        return None
    if weights is None:
        return probabilities(row_norms(x), mask=mask)
    if not weights.is_floating_point():
        raise TypeError(f"probabilities must be floating point, got {weights.dtype}. Use probabilities.double().")
    if weights.shape != x.shape[:1]:
        raise ValueError(
            f"probabilities must have one number for each of the {x.shape[0]} rows of x, got {tuple(weights.shape)}."
        )
    p = weights.double() if mask is None else torch.where(mask.valid, weights.double(), 0)
    if not bool((p >= 0).all() & p.isfinite().all() & p.any()):
        raise ValueError("probabilities must be finite, not negative and not all 0. Use mask to exclude tokens.")
    return p / p.sum()


def check_sketch(x: Tensor, *, kind: str, rows: int, block: int | None, mask: Tensor | None) -> None:
    """Check the arguments that describe a sketch of x, which closed forms and simulations have in common."""
    check_kind(kind)
    check_integer("rows", rows)
    if rows > x.shape[-2]:
        raise ValueError(f"rows must be at most the {x.shape[-2]} tokens, as no layer stores more, got {rows}.")
    check_integer("block", block, optional=True)
    check_block(kind, block)
    if mask is not None and mask.shape != x.shape[-2:-1]:
        raise ValueError(f"mask must have the shape ({x.shape[-2]},) of the rows of x, got {tuple(mask.shape)}.")


def over_layers(closed_form: Callable[..., Tensor], x: Tensor, grad_output: Tensor, p: Tensor | None = None) -> Tensor:
    """Apply a closed form to one layer after the other, with the memory of one layer: float64, shape () or (L,)."""
    check_pair(x, grad_output)
    tensors = [tensor.detach() for tensor in (x, grad_output, p) if tensor is not None]
    if x.dim() == 2:
        return closed_form(*tensors)
    values = [closed_form(*layer) for layer in zip(*tensors, strict=True)]
    return torch.stack(values) if values else x.new_zeros(0, dtype=torch.float64)
