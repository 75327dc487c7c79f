"""Autocast: run a function with it disabled, or cast by hand as it does for a linear layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_AS_IT_IS = nullcontext()


def is_autocast(device: str) -> bool:
    """Say whether autocast is on for a type of device; of the meta device, which has none, PyTorch cannot say it."""
    return device != "meta" and torch.is_autocast_enabled(device)


def autocast_off(device: str) -> AbstractContextManager[Any]:
    """Return a context without autocast, at no cost where it is off already."""
    return torch.autocast(device, enabled=False) if is_autocast(device) else _AS_IT_IS


def without_autocast(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Wrap a function so that it runs with autocast disabled for the device of its first tensor."""

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        device = next((one.device.type for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), "cpu")
        with autocast_off(device):
            return function(*args, **kwargs)

    return run


def autocast_dtype(device: str, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which autocast runs a linear layer; None while autocast is off."""
    if dtype == torch.float64 or not is_autocast(device):
        return None
    return torch.get_autocast_dtype(device)


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast a tensor as autocast does: only floating point, and not float64."""
    if dtype is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def autocast_now(devices: Iterable[str]) -> list[dict[str, Any]]:
    """Return the state of autocast, to enter it again later."""
    return [
        {
            "device_type": device,
            "dtype": torch.get_autocast_dtype(device),
            "enabled": torch.is_autocast_enabled(device),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for device in devices
        if device != "meta"
    ]


@contextmanager
def autocast_as(states: Iterable[dict[str, Any]], *, cached: bool = True) -> Iterator[None]:
    """Enter autocast as it was: off where it was off.

    ``cached=False`` casts parameters again for each use. What is cast without gradients must not stay in the cache:
    some versions of PyTorch take it later where gradients are needed, and there would be none.
    """
    with ExitStack() as stack:
        for state in states:
            if state["enabled"] or torch.is_autocast_enabled(state["device_type"]):
                stack.enter_context(torch.autocast(**{**state, "cache_enabled": cached and state["cache_enabled"]}))
        yield
