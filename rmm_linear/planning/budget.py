"""Read memory budgets: bytes, "2GB", or a share of the plain peak."""

from __future__ import annotations

import math

from torch import nn

from rmm_linear._support.sizes import read_bytes, read_share, show_bytes

_SHARES = 'Or a share of the exact peak: a float such as 0.6, or "60%". Or "least".'
LEAST = "least"  # as a budget: as little as a plan can need


class BudgetError(ValueError):
    """No plan meets a budget."""


def check_model(model: object) -> None:
    """Raise unless a value is a model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}. Pass the model.")


def read_budget(memory: object, plain: int) -> int:
    """Read bytes, a text such as "2GB", a share of ``plain`` such as 0.6 or "60%", or "least", which is 0 here.

    Example:
        >>> read_budget("2KiB", 100), read_budget(0.5, 100), read_budget("50%", 100), read_budget(1, 100)
        (2048, 50, 50, 1)
    """
    if memory == LEAST:
        return 0
    share = read_share("memory", memory)
    return read_bytes("memory", memory, _SHARES) if share is None else int(share * plain)


def shown_budget(memory: object, plain: int) -> str:
    """Write a budget as it was given, and the bytes of a share.

    Example:
        >>> shown_budget("8GB", 100), shown_budget(0.5, 100)
        ("'8GB'", '0.5 (50 bytes)')
    """
    is_share = memory != LEAST and read_share("memory", memory) is not None
    return f"{memory!r} ({show_bytes(read_budget(memory, plain))})" if is_share else repr(memory)


def shown_least(least: int, plain: int) -> str:
    """Write the least that is needed, also as a share of the exact peak, rounded up.

    Example:
        >>> shown_least(2150, 4096)
        '2150 bytes (2.10 KiB), 53 % of the exact peak of 4.00 KiB'
    """
    share = f"{math.ceil(100 * least / plain)} % of the exact peak of {show_bytes(plain)}"
    return f"{least} bytes ({show_bytes(least)}), {share}"
