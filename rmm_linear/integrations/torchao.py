"""Convert with torchao's function: ``quantize_(model, RMMConfig(), filter_fn)``, once this module is imported.

``filter_fn`` decides on one module after another, from the outside inwards, and what it accepts is converted by itself:
a linear layer alone, as with torchao's default; anything else with all that is inside of it, the whole model for
``lambda module, name: True``. Parts that are converted by themselves do not know of the model's padding, and layers
that read the same input do not share a sketch; :func:`rmm_linear.convert` and the whole model do.

Needs torchao; nothing else in the library imports this module.
"""

from __future__ import annotations

from torch import nn

from rmm_linear._support.installing import not_usable
from rmm_linear.config import RMMConfig
from rmm_linear.conversion.convert import convert

try:
    from torchao.core.config import AOBaseConfig  # pyright: ignore[reportMissingImports]
    from torchao.quantization.transform_module import (  # pyright: ignore[reportMissingImports]
        register_quantize_module_handler,
    )
except ImportError as missing:
    raise not_usable(__name__, "torchao", missing) from missing

AOBaseConfig.register(RMMConfig)  # the type that quantize_ takes; it has no methods


@register_quantize_module_handler(RMMConfig)
def _convert(module: nn.Module, config: RMMConfig) -> nn.Module:
    """Convert what ``filter_fn`` has accepted, in place."""
    if any(True for _ in module.children()):
        convert(module, config)
        return module
    for name, default in (("target_modules", RMMConfig.target_modules), ("exclude_modules", None), ("overrides", {})):
        if getattr(config, name) != default:
            raise ValueError(
                f"quantize_ chooses linear layers by filter_fn, got an RMMConfig with {name}={getattr(config, name)!r}"
                ", which needs their names. Leave it out, or accept the model: filter_fn=lambda module, name: True."
            )
    alone = nn.ModuleDict({"layer": module})
    convert(alone, config)
    return alone["layer"]
