"""Convert a SaveSpec and a token mask to the arguments of an operator (numbers, strings and tensors) and back.

This module is the only place that does so.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rmm_linear.sketches import TokenMask
from rmm_linear.spec import SaveSpec

# SymInt: an int would fix the number of tokens that rows follow from in compiled code.
SCHEMA = (
    "str kind, SymInt rows, SymInt? block=None, SymInt? bits=None, float uniform_mix=0.0, "
    "Tensor? order=None, Tensor? count=None"
)


def to_arguments(spec: SaveSpec, mask: TokenMask | None) -> tuple[Any, ...]:
    """Convert a spec and a mask to arguments.

    Args:
        spec: How the input is saved.
        mask: The valid tokens, or None for all.

    Returns:
        The arguments of :data:`SCHEMA`, in its order.
    """
    ranks = (None, None) if mask is None else (mask.order, mask.count)
    return spec.kind, spec.rows, spec.block, spec.bits, spec.uniform_mix, *ranks


def from_arguments(
    kind: str,
    rows: int,
    block: int | None = None,
    bits: int | None = None,
    uniform_mix: float = 0.0,
    order: Tensor | None = None,
    count: Tensor | None = None,
) -> tuple[SaveSpec, TokenMask | None]:
    """Convert the arguments of :func:`to_arguments` back.

    Args:
        kind: See :class:`rmm_linear.spec.SaveSpec`, as the following ones.
        rows: K.
        block: Tokens per block, or None.
        bits: Bits per stored element, or None.
        uniform_mix: For kinds that sample rows of X.
        order: See :class:`rmm_linear.sketches.TokenMask`; None is no mask.
        count: See there.

    Returns:
        The spec and the mask.
    """
    mask = None if order is None or count is None else TokenMask(order, count)
    return SaveSpec(kind, rows, block, bits, uniform_mix), mask
