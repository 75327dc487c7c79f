"""Match the names of modules with patterns by PEFT's rule."""

from __future__ import annotations

import re
from collections.abc import Sequence


def matches(patterns: str | Sequence[str], name: str) -> bool:
    """Say whether a dotted name matches a regular expression as a whole, or one of some names and dotted suffixes.

    Example:
        >>> matches(["query"], "layer.0.query"), matches(["query"], "layer.0.subquery")
        (True, False)
    """
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(name == entry or name.endswith(f".{entry}") for entry in patterns)
