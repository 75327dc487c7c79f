"""Prepare a model without weights for a way to train it: all weights, or adapters on frozen ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rmm_linear.fitting.quantised import as_quantised

ADAPTERS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def for_training(model: nn.Module, method: str, *, rank: int, dtype: str) -> nn.Module:
    """Add what a method trains to a model on the meta device."""
    if method == "full":
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError(f"--method {method} needs PEFT, which is not installed. Run pip install peft.") from error
    adapters = LoraConfig(r=rank, target_modules="all-linear")
    with torch.device("meta"):
        adapted: Any = get_peft_model(model, adapters, autocast_adapter_dtype=False)  # pyright: ignore[reportArgumentType]
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(ADAPTERS[dtype])
    if method == "qlora":
        as_quantised(adapted)
    return adapted
