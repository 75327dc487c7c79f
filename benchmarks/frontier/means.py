"""Means over seeds and their standard errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def mean_and_error(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the mean of values and its standard error.

    Args:
        values: One per seed.

    Returns:
        Both, NaN for the error of one value; None if there is none.
    """
    if not values:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def mean_over_groups(groups: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Return the mean of the means of groups, which need not be of one size, and its standard error.

    Args:
        groups: Of each task, one value per seed.

    Returns:
        Both, by independent groups: the error is √(Σ e²) / n for the errors e of n groups, NaN if one has a single
        value; None if a group is empty or there is none.
    """
    found = [mean_and_error(values) for values in groups]
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found):
        return None
    return statistics.mean(mean for mean, _ in known), math.hypot(*(error for _, error in known)) / len(known)


def text_of(found: tuple[float, float] | None, digits: int, *, factor: float = 1, sign: bool = False) -> str:
    """Write a mean, with its standard error where it is known.

    Args:
        found: Both.
        digits: After the point.
        factor: Of both.
        sign: Whether a positive mean has one.

    Returns:
        As "1.2 ± 0.3"; empty for None.
    """
    if found is None:
        return ""
    mean, error = found
    after = "" if math.isnan(error) else f" ± {factor * error:.{digits}f}"
    return format(factor * mean, f"{'+' if sign else ''}.{digits}f").replace("-", "−") + after


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
    return text_of(mean_and_error(values), digits, factor=factor, sign=sign)
