"""Read memory budgets: bytes, "2GB", or a share of the plain peak."""

from __future__ import annotations

from torch import nn

from rmm_linear._support.sizes import read_bytes

LEAST = "least"  # as a budget: as little as a plan can need


def check_model(model: object) -> None:
    """Raise unless a value is a model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}. Pass the model.")


def read_budget(memory: object, plain: int) -> int:
    """Read a number of bytes, a text such as "2GB", a share in (0, 1] of ``plain``, or "least", which is 0 here.

    Example:
        >>> read_budget("2KiB", 100), read_budget(0.5, 100), read_budget(1, 100)
        (2048, 50, 1)
    """
    if memory == LEAST:
        return 0
    if isinstance(memory, float):
        if not 0 < memory <= 1:
            raise ValueError(
                f'memory as a share must be in (0, 1], got {memory}. Use an integer or a text such as "2GB" for bytes.'
            )
        return int(memory * plain)
    return read_bytes("memory", memory)
