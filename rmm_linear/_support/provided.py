"""Use in a lower part of the library what a higher one provides, without importing it.

``rmm_linear/__init__.py``, which knows all parts, says where it is. It is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES: dict[str, tuple[str, str]] = {}


def provide(what: str, module: str, name: str) -> None:
    """Say which name of which module something is."""
    _PLACES[what] = module, name


def provided(what: str) -> Any:
    """Return what :func:`provide` named."""
    module, name = _PLACES[what]
    return getattr(importlib.import_module(module), name)
