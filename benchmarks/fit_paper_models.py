"""LLaMAs without weights, batches for them, and the devices that they are planned for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rmm_linear.fitting.shards import Shards

Shape = Mapping[str, Any]
MODELS: dict[str, Shape] = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "70b": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512,
    },
}  # fmt: skip
PLACES: dict[str, tuple[str, Shards | None]] = {
    "1 x 24 GB": ("24GB", None),
    "1 x 80 GB": ("80GB", None),
    "8 x 80 GB": ("80GB", Shards(8)),
    "8 x 80 GB, offloaded": ("80GB", Shards(8, cpu_offload=True)),
}


def llama(shape: Shape) -> nn.Module:
    """Make a LLaMA without weights, in bfloat16.

    Args:
        shape: Of :data:`MODELS`.

    Returns:
        The model on the meta device.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig  # not installed where only other parts run

    with torch.device("meta"):
        config = LlamaConfig(**shape, use_cache=False, max_position_embeddings=2**24)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def with_adapters(shape: Shape) -> nn.Module:
    """Make it with LoRA adapters of rank 16 on all linear layers but the head, all in bfloat16; they alone are trained.

    Args:
        shape: Of :data:`MODELS`.

    Returns:
        The model on the meta device.
    """
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        model = get_peft_model(llama(shape), adapters, autocast_adapter_dtype=False)  # pyright: ignore[reportArgumentType]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def texts(batch: int, sequence: int, device: str = "meta") -> dict[str, torch.Tensor]:
    """Make a batch of texts without padding.

    Args:
        batch: Number of texts.
        sequence: Tokens of each.
        device: Where.

    Returns:
        Tokens, which are labels too.
    """
    ids = torch.zeros(batch, sequence, dtype=torch.long, device=device)
    return {"input_ids": ids, "labels": ids}
