"""Measure the whole gradient on a training step's batch, before the step's own forward pass."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rmm_linear.config import RMMConfig
from rmm_linear.conversion.exact import converted_modules
from rmm_linear.conversion.names import unwrapped
from rmm_linear.variance.whole_model import GradientNoise, gradient_noise

_POSITIONAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)


def measure_whole(model: nn.Module, args: Any, kwargs: Any, config: RMMConfig | None, draws: int) -> GradientNoise:
    """Measure the noise of the whole gradient on the batch that a model is being called with.

    Args:
        model: The model, wrapped or not.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        config: As for :func:`gradient_noise`, if the model is not converted.
        draws: As for :func:`gradient_noise`.

    Returns:
        The noise.
    """
    model = unwrapped(model)
    batch = tree_map_only(Tensor, _own, _keywords(model, args, kwargs))
    # The innermost hooks alone are called: a ledger of what the step saves leaves these passes out.
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return gradient_noise(model, batch, None if converted_modules(model) else config, draws=draws)


def _own(tensor: Tensor) -> Tensor:
    """A copy, so that nothing is changed in place and no graph outside of the model is walked."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _keywords(model: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    if not args:
        return dict(kwargs)
    signature = inspect.signature(model.forward)
    given = signature.bind_partial(*args).arguments
    if any(signature.parameters[name].kind in _POSITIONAL for name in given):
        raise ValueError("it is called with positional arguments that have no names. Call it with keywords.")
    return {**given, **kwargs}
