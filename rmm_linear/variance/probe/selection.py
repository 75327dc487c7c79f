"""Which layers a GradientProbe looks at."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from rmm_linear.config import RMMConfig
from rmm_linear.conversion.names import is_conv1d, nearest, not_selected, output_heads
from rmm_linear.layers.base import SketchedLayer


def choose_layers(model: nn.Module, modules: str | Sequence[str] | None, config: RMMConfig) -> dict[str, nn.Module]:
    """Choose the layers that a probe looks at.

    Args:
        model: The model.
        modules: As for GradientProbe.
        config: Selects the layers of a model that is not converted.

    Returns:
        Name to layer.

    Raises:
        ValueError: If no linear layer matches.
    """
    names = {module: name for name, module in model.named_modules() if name}
    linears = {name: module for module, name in names.items() if _can_be_probed(module)}
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


def _can_be_probed(module: nn.Module) -> bool:
    return isinstance(module, SketchedLayer) or type(module) is nn.Linear or is_conv1d(module)
