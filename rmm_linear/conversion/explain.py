"""Explain what a conversion would save, by converting a model for a while."""

from __future__ import annotations

from typing import Any

from torch import nn

from rmm_linear._support.quiet import quiet
from rmm_linear.config import RMMConfig
from rmm_linear.conversion.convert import convert
from rmm_linear.conversion.exact import unconvert
from rmm_linear.conversion.explained import explained, keep_exact_on
from rmm_linear.conversion.explanation import Explanation
from rmm_linear.memory.inputs import check_example


def explain(model: nn.Module, batch: Any, config: RMMConfig | None = None, **overrides: Any) -> Explanation:
    """Run a model before and after a trial conversion and report the bytes saved for backward.

    They are listed by operation; by what is still saved uncompressed, and why; and by linear layer, with the reason
    where a sketch would not reduce them. Modules that would free nothing are exact, as they are in training from its
    second step on. Four forward passes in training mode are run, and no backward pass. Layers, buffers, random number
    generators and training mode are restored.

    Args:
        model: A model that is not converted.
        batch: A training batch: a mapping of keyword arguments, a sequence of arguments, or one argument.
        config: As for :func:`rmm_linear.convert`.
        **overrides: As for :func:`rmm_linear.convert`.

    Returns:
        The explanation. Print it.

    Raises:
        TypeError: If the batch is none that the model can be called with.
        ValueError: If it is on another device; or as :func:`rmm_linear.convert`.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        >>> found = explain(model, torch.ones(1000, 64), ratio=0.1, target_modules=["0"])
        >>> found.layers["0"]
        LayerMemory(before=256000, after=25608, reason=None)
    """
    check_example(model, batch)
    with quiet():  # the conversion is for a while
        report = convert(model, config, **overrides)
    try:
        assert report.context is not None  # noqa: S101
        with quiet():
            keep_exact_on(model, report.context, batch)
        return explained(model, report, batch)
    finally:
        unconvert(model)
