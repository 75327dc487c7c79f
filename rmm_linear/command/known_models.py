"""Sizes of published models, as their configurations on the hub have them, so that a plan needs no network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _decoder(architecture: str, words: int, width: int, inner: int, **others: Any) -> dict[str, Any]:
    sizes = {"vocab_size": words, "hidden_size": width, "intermediate_size": inner}
    return {"architectures": [architecture], **sizes, "tie_word_embeddings": False, **others}


def _heads(layers: int, heads: int, pairs: int, width: int) -> dict[str, int]:
    each = {"num_attention_heads": heads, "num_key_value_heads": pairs, "head_dim": width}
    return {"num_hidden_layers": layers, **each}


_SCALED = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA_3 = {
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {**_SCALED, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}

# Names of commands to the type of a model in transformers, and its configuration.
KNOWN: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama-3.1-8b": (
        "llama",
        _decoder("LlamaForCausalLM", 128_256, 4096, 14_336, **_heads(32, 32, 8, 128), **_LLAMA_3),
    ),
    "llama-3.1-70b": (
        "llama",
        _decoder("LlamaForCausalLM", 128_256, 8192, 28_672, **_heads(80, 64, 8, 128), **_LLAMA_3),
    ),
    "qwen3-8b": (
        "qwen3",
        _decoder(
            *("Qwen3ForCausalLM", 151_936, 4096, 12_288),
            **_heads(36, 32, 8, 128),
            max_position_embeddings=40_960,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        ),
    ),
    "gpt-oss-20b": (  # the defaults of its class are those of 120b, but for:
        "gpt_oss",
        _decoder(
            *("GptOssForCausalLM", 201_088, 2880, 2880),
            **_heads(24, 64, 8, 64),
            num_local_experts=32,
            num_experts_per_tok=4,
        ),
    ),
    "roberta-base": (
        "roberta",
        {
            "architectures": ["RobertaForMaskedLM"],
            "vocab_size": 50_265,
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
        },
    ),
}

_ON_THE_HUB = {
    "meta-llama/llama-3.1-8b": "llama-3.1-8b",
    "meta-llama/llama-3.1-8b-instruct": "llama-3.1-8b",
    "meta-llama/llama-3.1-70b": "llama-3.1-70b",
    "meta-llama/llama-3.1-70b-instruct": "llama-3.1-70b",
    "qwen/qwen3-8b": "qwen3-8b",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "facebookai/roberta-base": "roberta-base",
}


def known(name: str) -> tuple[str, Mapping[str, Any]] | None:
    """Return the type and the configuration of a model, by its name here or on the hub, in any case; None if unknown.

    Example:
        >>> known("Qwen/Qwen3-8B")[0], known("qwen3")
        ('qwen3', None)
    """
    return KNOWN.get(_ON_THE_HUB.get(name.lower(), name.lower()))
