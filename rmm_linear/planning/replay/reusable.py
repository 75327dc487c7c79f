"""Contexts that may be entered again: a graph that is retained is recomputed once per backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType


class Reusable(AbstractContextManager[None]):
    """Makes a context anew every time it is entered."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        """Begin outside of the context.

        Args:
            make: Makes it.
        """
        self._make = make
        self._entered: list[AbstractContextManager[object]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)
