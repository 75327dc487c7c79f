"""How activation checkpointing is turned on in a model, as far as its modules say so, and how to turn it off."""

from __future__ import annotations

from torch import nn

FLAGS = ("gradient_checkpointing", "activation_checkpointing")  # of transformers, by version
_METHODS = ("activation_checkpointing_disable", "gradient_checkpointing_disable")  # the newer name first
_WRAPPER = "CheckpointWrapper"


def is_on(module: nn.Module) -> bool:
    """Say whether one of transformers' flags is set on a module.

    Args:
        module: The module.

    Returns:
        True or False.
    """
    return any(getattr(module, flag, False) is True for flag in FLAGS)


def is_wrapper(module: nn.Module) -> bool:
    """Say whether a module is one that torch's checkpoint_wrapper has made.

    Args:
        module: The module.

    Returns:
        True or False.
    """
    return any(kind.__name__ == _WRAPPER for kind in type(module).__mro__)


def how_to_turn_off(model: nn.Module | None) -> str:
    """Say how to turn checkpointing off: by the method that the model has for its flags, or in one's own code.

    Args:
        model: The model; None if it is not known.

    Returns:
        What to do.
    """
    modules = {} if model is None else dict(model.named_modules())
    if any(map(is_on, modules.values())):
        for name, module in modules.items():
            for method in _METHODS:
                if callable(getattr(module, method, None)):
                    call = ".".join(part for part in ("model", name, method) if part)
                    return f"{call}(), or gradient_checkpointing=False in TrainingArguments"
    if any(map(is_wrapper, modules.values())):
        return "leave out checkpoint_wrapper"
    return "do not call torch.utils.checkpoint"
