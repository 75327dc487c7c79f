"""The models and batches on which whole blocks are measured: random weights in the shapes of RoBERTa-base and LLaMA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from rmm_linear.config import OPERATIONS
from rmm_linear.memory import track_saved

LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def roberta(dropout: float, layers: int = 12, width: int = 768, vocabulary: int = 50265) -> nn.Module:
    """Make RoBERTa-base's shape with random weights, as a classifier."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        max_position_embeddings=514,
    )
    return RobertaForSequenceClassification(config).train()


def llama(layers: int = 12, width: int = 768, vocabulary: int = 32_000) -> nn.Module:
    """Make a small LLaMA with random weights: SwiGLU, RMSNorm, RoPE, three queries for each key."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 192),
        intermediate_size=8 * width // 3,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).train()


def with_lora(model: nn.Module) -> nn.Module:
    """Put LoRA on the queries and values."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(**LORA))  # pyright: ignore[reportArgumentType]


Case = tuple[str, Callable[[], nn.Module], tuple[int, int], torch.dtype]


def cases(tiny: bool) -> list[Case]:
    """Title, model, batch and sequence, and dtype."""
    size: dict[str, Any] = {"layers": 2, "width": 128, "vocabulary": 1000} if tiny else {}
    encoder, decoder = ((2, 128), (2, 128)) if tiny else ((8, 128), (4, 256))
    found: list[Case] = [
        ("roberta-base, dropout 0.1", lambda: roberta(0.1, **size), encoder, torch.float32),
        ("roberta-base, no dropout", lambda: roberta(0.0, **size), encoder, torch.float32),
        ("roberta-base, dropout 0.1", lambda: roberta(0.1, **size), encoder, torch.bfloat16),
        ("roberta-base, no dropout", lambda: roberta(0.0, **size), encoder, torch.bfloat16),
        ("llama", lambda: llama(**size), decoder, torch.float32),
        ("llama, LoRA on q and v", lambda: with_lora(llama(**size)), decoder, torch.float32),
    ]
    return found[1::4] if tiny else found


SETTINGS: tuple[tuple[str, ...], ...] = ((), OPERATIONS[:1], OPERATIONS)  # exact, the published method, the default


def steps(tiny: bool) -> list[tuple[str, Callable[[], nn.Module], tuple[int, int]]]:
    """Title, model, and batch and sequence of the training steps that are timed."""
    size: dict[str, Any] = {"layers": 2, "width": 128, "vocabulary": 1000} if tiny else {}
    return [
        (f"roberta-base, {batch} x {length}, dropout {dropout}", partial(roberta, dropout, **size), (batch, length))
        for batch, length in (((2, 64),) if tiny else ((8, 128), (2, 512)))
        for dropout in ((0.1,) if tiny else (0.1, 0.0))
    ]


def inputs(model: nn.Module, batch: int, length: int, seed: int = 0) -> dict[str, Any]:
    """Make a batch of a Markov chain: every token is followed by one of four, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = int(model.config.vocab_size)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    tokens = [torch.randint(5, vocabulary, (batch,), generator=generator)]
    for _ in range(length - 1):
        step = torch.randint(4, (batch,), generator=generator)
        tokens.append((tokens[-1] * 31 + step * 977) % (vocabulary - 5) + 5)
    ids = torch.stack(tokens, 1)
    is_decoder = any(name.endswith("lm_head") for name, _ in model.named_modules())
    labels = ids.clone() if is_decoder else ids[:, 0] % 2
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def saved(model: nn.Module, batch: Mapping[str, Any]) -> int:
    """Bytes that autograd saves of one forward pass."""
    with track_saved(model) as ledger:
        loss = model(**batch).loss
    count = ledger.total
    del loss
    return count
