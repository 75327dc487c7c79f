"""Autocast: run a function with it disabled, or do by hand what it does to a linear layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_autocast(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function that autocast does not change.

    Args:
        function: Takes a tensor at least; the first one's device decides.

    Returns:
        The function, for which autocast is off.
    """

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        device = next((one.device.type for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), "cpu")
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run


def autocast_dtype(device: str, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype that autocast runs a linear layer in.

    Args:
        device: Type of the input's device.
        dtype: The input's dtype.

    Returns:
        The dtype, or None while autocast is off.
    """
    if dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast as autocast does: floating point but not float64.

    Args:
        tensor: Any tensor.
        dtype: The dtype, or None while autocast is off.

    Returns:
        The tensor in that dtype.
    """
    if dtype is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)
