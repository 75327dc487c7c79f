"""What is said where a conversion saves nothing: each once for a model, in its first training step at the latest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn

_SHOWN = 3


def checkpointed_message(names: Sequence[str], converted: Sequence[str]) -> str:
    """Say that recomputed modules stay exact, what is left to gain, and how to gain more.

    Args:
        names: The recomputed modules; empty if they are not known.
        converted: All converted modules.

    Returns:
        One paragraph.
    """
    if names:
        rest = len(converted) - len(names)
        what = f"{len(names)} of the {len(converted)} converted modules ({_shown(names)})"
        left = f"in the other {rest} alone" if rest else "nowhere"
    else:
        what, left = "converted modules", "in others alone"
    return (
        f"Activation checkpointing recomputes {what}. It drops what they save for the backward pass, so they stay "
        f"exact and add no noise, and the conversion saves memory {left}. To save memory without recomputing, turn "
        "checkpointing off (model.gradient_checkpointing_disable(), or gradient_checkpointing=False in "
        "TrainingArguments). To lower the peak inside of the block that is being recomputed, convert with "
        'checkpointed="packed".'
    )


def unsketched_message(model: nn.Module) -> str | None:
    """Say that other linear layers are trained than the sketched ones.

    Args:
        model: A converted model, in training.

    Returns:
        One paragraph; None if a sketched layer is trained, or no linear layer is.
    """
    modules = dict(model.named_modules())
    sketched = [module for module in modules.values() if getattr(module, "rmm_operation", None) == "linear"]
    trained = [name for name, module in modules.items() if type(module) is nn.Linear and module.weight.requires_grad]
    if not sketched or not trained or any(_is_trained(module) for module in sketched):
        return None
    return (
        f"Sketches replace the input of linear layers that are trained, and none of the {len(sketched)} sketched "
        f"layers is: the model trains {len(trained)} others ({_shown(trained)}), which save their whole input. They "
        "came after convert, or were not selected. Call rmm_linear.convert after get_peft_model; in a Trainer, "
        "RMMCallback(convert=RMMConfig()) converts once all wrappers are there."
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
        f"ran ({_shown(list(rows))}) saw {seen}, so no sketch was made. Give larger batches, or convert with a smaller "
        "min_rows; a head that sees one row per sequence saves little anyway."
    )


def _is_trained(module: nn.Module) -> bool:
    return module.weight.requires_grad  # pyright: ignore[reportReturnType]


def _shown(names: Sequence[str]) -> str:
    patterns = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names))
    return ", ".join(patterns[:_SHOWN]) + (", …" if len(patterns) > _SHOWN else "")
