"""A plugin for axolotl: ``plugins: [rmm_linear.integrations.axolotl.RMMPlugin]``, and an ``rmm`` section in the YAML.

Needs axolotl, which loads it by this name; nothing else in the library imports this module.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, field_validator

from rmm_linear._support.installing import not_usable
from rmm_linear.config import RMMConfig

try:
    from axolotl.integrations.base import BasePlugin  # pyright: ignore[reportMissingImports]
except ImportError as missing:
    raise not_usable(__name__, "axolotl", missing) from missing

from rmm_linear.integrations.transformers import RMMCallback

logger = logging.getLogger(__name__)

_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


class RMMArgs(BaseModel):
    """The ``rmm`` section: fields of :class:`rmm_linear.RMMConfig` and ``quality``, or ``fit`` alone.

    ``fit`` is a budget such as ``8GB``, or has arguments of :func:`rmm_linear.fit`; ``checkpointing: keep`` goes with
    either, as for RMMCallback. Without the section the default converts. Unknown keys are errors.
    """

    rmm: dict[str, Any] | None = None

    @field_validator("rmm")
    @classmethod
    def _check(cls, section: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            read_section(section or {})
        except TypeError as error:  # which pydantic would not report with the section's name
            raise ValueError(str(error)) from error
        return section


class RMMPlugin(BasePlugin):
    """Adds an :class:`RMMCallback <rmm_linear.integrations.transformers.RMMCallback>` to axolotl's trainer.

    The model is converted when training begins, after its adapters. axolotl's fused LoRA kernels, which it switches on
    where nothing is said of them, stay off.
    """

    def get_input_args(self) -> str:
        return f"{__name__}.RMMArgs"

    def register(self, cfg: Any) -> None:
        """Keep axolotl from switching on its LoRA kernels, which save what they like; those that are given stay."""
        for name in _KERNELS:
            if cfg.get(name):
                logger.warning("%s is on: what axolotl's kernels save stays as it is. Leave it out.", name)
            elif cfg.get("adapter") and cfg.get(name) is None:
                cfg[name] = False

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[RMMCallback]:
        return [RMMCallback(trainer, **read_section(cfg.rmm or {}))]


def read_section(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of RMMCallback for an ``rmm`` section."""
    given = {name: value for name, value in section.items() if value is not None}
    named = {"checkpointing": given.pop("checkpointing")} if "checkpointing" in given else {}
    if "fit" not in given:
        convert = RMMConfig.preset(given.pop("quality", "default"), **given)
        RMMCallback(convert=convert, **named)
        return {"convert": convert, **named}
    if len(given) > 1:
        raise ValueError(f"rmm takes fit alone, or what to convert, got {', '.join(given)}. Leave out the others.")
    RMMCallback(**given, **named)
    return {**given, **named}
