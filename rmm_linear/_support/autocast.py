"""What is computed in the precision of its own arguments, under autocast too."""

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
