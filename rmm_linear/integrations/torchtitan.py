"""A policy for torchtitan in place of checkpointing: ``activation_checkpoint = CompressedActivations.Config()``.

torchtitan applies the policy that its Trainer's configuration names to the model, before ``torch.compile`` and FSDP.
This one converts the model, so nothing is recomputed. The output layer stays exact: torchtitan's loss runs it in
chunks.

Needs torchtitan; nothing else in the library imports this module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rmm_linear._support.installing import not_usable
from rmm_linear.config import RMMConfig
from rmm_linear.conversion.convert import convert

try:
    from torchtitan.distributed.activation_checkpoint import (  # pyright: ignore[reportMissingImports]
        ActivationCheckpointing,
    )
    from torchtitan.tools.logging import logger  # pyright: ignore[reportMissingImports]
except ImportError as missing:
    raise not_usable(__name__, "torchtitan", missing) from missing


class CompressedActivations(ActivationCheckpointing):
    """Makes a model save compressed activations, instead of recomputing its blocks."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """Select what is compressed."""

        quality: str = "default"  # "careful", "default" or "smallest", see RMMConfig.preset
        rmm: dict[str, Any] = field(default_factory=dict)  # fields of RMMConfig that differ

        def __post_init__(self) -> None:
            RMMConfig.preset(self.quality, **self.rmm)

    def apply(self, model: nn.Module) -> None:
        """Convert a model, on the meta device too."""
        config = RMMConfig.preset(self.config.quality, **self.config.rmm)
        head = getattr(model, "lm_head", None)
        self.report = convert(model, config, filter=lambda module, name: module is not head)
        logger.info(f"Applied {type(self).__name__}: {self.report.summary()}")
