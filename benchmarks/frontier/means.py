"""Means over seeds and their standard errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def mean_and_error(values: Sequence[float]) -> tuple[float, float, int] | None:
    """Return the mean of values and its standard error.

    Args:
        values: One per seed.

    Returns:
        Both, NaN for the error of one value, and how many there are; None if there is none.
    """
    if not values:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error, len(values)


def mean_text(values: Sequence[float], digits: int, *, factor: float = 1, sign: bool = False) -> str:
    """Write the mean of values, with its standard error where there are several.

    Args:
        values: One per seed.
        digits: After the point.
        factor: Of both.
        sign: Whether a positive mean has one.

    Returns:
        As "1.2 ± 0.3"; empty without values.
    """
    found = mean_and_error(values)
    if found is None:
        return ""
    error = f" ± {factor * found[1]:.{digits}f}" if found[2] > 1 else ""
    return format(factor * found[0], f"{'+' if sign else ''}.{digits}f").replace("-", "−") + error
