"""What is said where a conversion saves nothing: each once for a model, in its first training step at the latest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from rmm_linear._support.tables import pattern_of
from rmm_linear.context.checkpoint_flags import how_to_turn_off

_SHOWN = 3


def checkpointed_message(names: Sequence[str], converted: Sequence[str], model: nn.Module | None) -> str:
    """Say that recomputed modules stay exact, what is left to gain, and how to gain more.

    Args:
        names: The recomputed modules.
        converted: All converted modules.
        model: The model, by which the remedy is named; None if it is not known.

    Returns:
        One paragraph.
    """
    rest = len(converted) - len(names)
    left = f"in the other {rest} alone" if rest else "nowhere"
    return (
        f"Activation checkpointing recomputes {len(names)} of the {len(converted)} converted modules ({shown(names)}). "
        "It drops what they save for the backward pass, so they stay exact and add no noise, and the conversion saves "
        f"memory {left}. To save memory without recomputing, turn checkpointing off: {how_to_turn_off(model)}. "
        'To lower the peak inside of the block that is being recomputed, convert with checkpointed="packed".'
    )


def late_message(names: Sequence[str]) -> str:
    """Say that linear layers are trained that came after the conversion.

    Args:
        names: Their names.

    Returns:
        One paragraph.
    """
    return (
        "Sketches replace the input of linear layers that are in a model when it is converted, and this one trains "
        f"{len(names)} that came later, as adapters do ({shown(names)}): they save their whole input. Call "
        "rmm_linear.revert(model), then rmm_linear.convert after get_peft_model; in a Trainer, pass "
        "RMMCallback(convert=RMMConfig()) instead of an earlier convert."
    )


def few_rows_message(rows: Mapping[str, int], min_rows: int) -> str:
    """Say that all sketched layers saw too few rows.

    Args:
        rows: Name of each to the number of rows that it saw.
        min_rows: The least number that is saved, of the configuration.

    Returns:
        One paragraph.
    """
    least, most = min(rows.values()), max(rows.values())
    seen = f"{least}" if least == most else f"{least} to {most}"
    return (
        f"Layers that see at most min_rows={min_rows} rows stay exact, and all {len(rows)} trained linear layers that "
        f"ran ({shown(list(rows))}) saw {seen}, so no sketch was made. Give larger batches, or convert with a smaller "
        "min_rows; a head that sees one row per sequence saves little anyway."
    )


def shown(names: Sequence[str]) -> str:
    """Name a few of many modules, those that differ in numbers alone together.

    Args:
        names: Their names.

    Returns:
        Up to three names or patterns, separated by commas.

    Example:
        >>> shown(["0", "1.2.bias", "1.3.bias", "head", "last"])
        '0, 1.*.bias, head, …'
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(pattern_of(name), []).append(name)
    patterns = [pattern if len(group) > 1 else group[0] for pattern, group in groups.items()]
    return ", ".join(patterns[:_SHOWN]) + (", …" if len(patterns) > _SHOWN else "")
