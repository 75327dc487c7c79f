"""Models of transformers with random weights, and what several benchmarks do with them."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

from torch import nn


def build(kind: str, head: str, **sizes: Any) -> Any:
    import transformers

    return getattr(transformers, kind + head)(getattr(transformers, f"{kind}Config")(**sizes))


def twin(model: nn.Module) -> nn.Module:
    """Copy a model, but for its parameters, which both have."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def check_transformers(suite: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(f"The suite {suite} needs transformers: pip install transformers. Choose others by --suite.")


def checkpoint(model: Any) -> None:
    """Recompute all layers."""
    # Older versions of transformers know it by the second name alone.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
