"""The names of the norm estimators that ``RMMConfig.norm_estimator`` takes."""

from __future__ import annotations

import functools
from collections.abc import Callable

from rmm_linear._support.validation import did_you_mean
from rmm_linear.norm_estimators.base import NormEstimator
from rmm_linear.norm_estimators.cache import SampleCache
from rmm_linear.norm_estimators.running import POSITION, TOKEN, RunningNorms

NONE = "none"
_BUILT_IN: dict[str, Callable[[], NormEstimator | None]] = {
    NONE: lambda: None,
    "position": functools.partial(RunningNorms, (POSITION,)),
    "token": functools.partial(RunningNorms, (TOKEN,)),
    "position_token": functools.partial(RunningNorms, (POSITION, TOKEN)),
    "sample_cache": SampleCache,
    "sequence_cache": functools.partial(SampleCache, per_token=False),
}
_registered: dict[str, Callable[[], NormEstimator]] = {}


def register_norm_estimator(name: str, factory: Callable[[], NormEstimator]) -> None:
    """Register a custom norm estimator, or one with other options, under a name for ``RMMConfig.norm_estimator``.

    Args:
        name: The name. Built-in names cannot be replaced; a registered one can.
        factory: Makes the estimator of one layer; called without arguments once per layer.

    Raises:
        TypeError: If the factory is not callable.
        ValueError: If the name is empty or built in.

    Example:
        >>> from rmm_linear import RMMConfig
        >>> from rmm_linear.estimators import SampleCache, register_norm_estimator
        >>> register_norm_estimator("small_cache", lambda: SampleCache(max_bytes=2**20))
        >>> RMMConfig(kind="wta", norm_estimator="small_cache").norm_estimator
        'small_cache'
    """
    if not isinstance(name, str) or not name or name in _BUILT_IN:
        raise ValueError(f"name must be new and not empty, got {name!r}. Taken are {', '.join(_BUILT_IN)}.")
    if not callable(factory):
        raise TypeError(f"factory must make an estimator when it is called, got {factory!r}.")
    _registered[name] = factory


def norm_estimators() -> tuple[str, ...]:
    """List the names of all norm estimators.

    Returns:
        The built-in names, then the registered ones.
    """
    return (*_BUILT_IN, *_registered)


def make_norm_estimator(name: str) -> NormEstimator | None:
    """Make the estimator of one layer.

    Args:
        name: One of :func:`norm_estimators`.

    Returns:
        The estimator; None for "none".

    Raises:
        TypeError: If a registered factory returned something other than a NormEstimator.
        ValueError: If the name is unknown.
    """
    check_norm_estimator(name)
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    made = _registered[name]()
    if not isinstance(made, NormEstimator):
        raise TypeError(f"The factory of {name!r} must make a NormEstimator, got {type(made).__name__}.")
    return made


def check_norm_estimator(name: object) -> None:
    """Raise ValueError unless ``name`` is the name of a norm estimator."""
    if name not in norm_estimators():
        raise ValueError(
            f"norm_estimator must be one of {', '.join(norm_estimators())}, got {name!r}. "
            f"Others are added by rmm_linear.estimators.register_norm_estimator.{did_you_mean(name, norm_estimators())}"
        )
