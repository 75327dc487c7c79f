"""Take the place of the forward pass of one module, around what is there already."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


class Wrapped:
    """A callable in the place of a module's method ``forward``, so that hooks of the module itself run once.

    What others put around it since stays when it is detached: from then on it runs what it wraps, and no more.
    """

    replaced: Callable[..., Any] | None = None  # by another library, or by one of these
    is_off = False  # detached, and still inside of what others put around it

    def __init__(self, module: nn.Module) -> None:
        """Wrap a module's forward pass, for :meth:`attach`."""
        self.module = module

    @property
    def inner(self) -> Callable[..., Any]:
        """What it wraps; looked up at each call, so that copies and pickled models have their own."""
        return MethodType(type(self.module).forward, self.module) if self.replaced is None else self.replaced

    def attach(self) -> None:
        """Run instead of what is there now, from now on."""
        self.replaced, self.is_off = self.module.__dict__.get("forward"), False
        self.module.forward = self  # pyright: ignore[reportAttributeAccessIssue]

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        detached(self, self.module, "forward", self.replaced)


def detached(wrapper: Any, module: nn.Module, method: str, replaced: Any) -> None:
    """Put back what a wrapper has replaced, or turn it off where it is no longer the outermost one."""
    if vars(module).get(method) is not wrapper:
        wrapper.is_off = True
    elif replaced is None:
        del vars(module)[method]
    else:
        setattr(module, method, replaced)
