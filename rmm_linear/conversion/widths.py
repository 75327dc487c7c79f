"""Widths of activations for ``activation_bits="auto"``: 4 bits, and 2 where few layers inherit the noise.

The error of an activation's derivative is in the gradients of every layer below it, so that of the top ones is in
nearly all and that of the lowest in its own block's alone. With 2 bits, an activation adds about 25 times the noise of
one with 4. The lowest quarter of a model's activations takes 2 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from rmm_linear.config import RMMConfig

WIDE, NARROW = 4, 2
_NARROW_PART = 4  # the lowest quarter


def choose_widths(names: Sequence[str], config: RMMConfig) -> dict[str, int]:
    """Choose the width of every activation.

    Args:
        names: Names of a model's activations, from the lowest to the top one.
        config: The configuration; ``activation_bits`` that is not "auto", of the model or of an override, is the width.

    Returns:
        Name to width.

    Example:
        >>> choose_widths(["0.act", "1.act", "2.act", "3.act"], RMMConfig())
        {'0.act': 2, '1.act': 4, '2.act': 4, '3.act': 4}
    """
    widths = {}
    for place, name in enumerate(names):
        said = config.for_module(name).activation_bits
        auto = NARROW if place < len(names) // _NARROW_PART else WIDE
        widths[name] = auto if said == "auto" else int(said)
    return widths
