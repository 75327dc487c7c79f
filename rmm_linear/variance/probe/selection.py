"""Choose the layers that a GradientProbe measures, and measure the whole gradient before a step's own forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rmm_linear.config import RMMConfig
from rmm_linear.conversion.exact import converted_modules
from rmm_linear.conversion.names import is_conv1d, nearest, not_selected, output_heads, unwrapped
from rmm_linear.layers.linear import SketchedLayer
from rmm_linear.variance.whole_model import GradientNoise, gradient_noise


def choose_layers(model: nn.Module, modules: str | Sequence[str] | None, config: RMMConfig) -> dict[str, nn.Module]:
    names = {module: name for name, module in model.named_modules() if name}
    linears = {n: m for m, n in names.items() if isinstance(m, SketchedLayer) or type(m) is nn.Linear or is_conv1d(m)}
    if not linears and modules is None and converted_modules(model):
        return {}  # the whole gradient alone is measured
    if not linears:
        raise ValueError(
            f"GradientProbe needs a model with linear layers inside, got {type(model).__name__} without any. Wrap a "
            "single layer: torch.nn.Sequential(layer), and call that."
        )
    sketched: dict[str, nn.Module] = {n: module for n, module in linears.items() if isinstance(module, SketchedLayer)}
    if modules is None and sketched:
        return sketched
    wanted = config if modules is None else config.replace(target_modules=modules, exclude_modules=None)
    heads = output_heads(model)
    chosen = {name: m for name, m in linears.items() if not_selected(name, m, wanted, heads) is None}
    if not chosen:
        target = wanted.target_modules
        pattern = target if isinstance(target, str) else target[0]
        raise ValueError(
            f"modules must match a linear layer, got {target!r}, which matches none. "
            f"The nearest layers are {nearest(pattern, list(linears))}."
        )
    return chosen


_POSITIONAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)


def measure_whole(model: nn.Module, args: Any, kwargs: Any, config: RMMConfig | None, draws: int) -> GradientNoise:
    model = unwrapped(model)
    batch = tree_map_only(Tensor, _own, _keywords(model, args, kwargs))
    # The innermost hooks alone are called: a ledger of what the step saves leaves these passes out.
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
        return gradient_noise(model, batch, None if converted_modules(model) else config, draws=draws)


def _own(tensor: Tensor) -> Tensor:
    """Return a copy, so that nothing is changed in place and no graph outside of the model is walked."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _keywords(model: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    if not args:
        return dict(kwargs)
    signature = inspect.signature(model.forward)
    given = signature.bind_partial(*args).arguments
    if any(signature.parameters[name].kind in _POSITIONAL for name in given):
        raise ValueError("it is called with positional arguments that have no names. Call it with keywords.")
    return {**given, **kwargs}
