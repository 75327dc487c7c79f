"""What ten families of models still save after a conversion that is no stand-in: ``python -m benchmarks.blocks left``.

Every model has two layers with random weights, in training mode, with its loss and its family's own dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.records import Origin
from rmm_linear.memory import explain

LEAST = 0.02  # share of what the exact model saves, from which on a keeper has a row
VOCABULARY = 1000
ALL = "all"  # instead of the name of modules

Family = tuple[Callable[[], nn.Module], dict[str, Tensor]]


@dataclass(frozen=True)
class LeftRow(Origin):
    """What some modules of one model save after the conversion without a stand-in.

    Attributes:
        case: Name of the family.
        modules: Name of the modules, numbers replaced by *, or "all" for the whole model, stand-ins too.
        dtype: dtype of the model.
        exact: Bytes that the exact model saves, all of it.
        value: Bytes that the modules save.
        share: ``value`` by ``exact``.
        reason: Why they do.
    """

    case: str
    modules: str
    dtype: str = "float32"
    exact: int = 0
    value: int = 0
    share: float = 0.0
    reason: str = ""


def measure_left(tiny: bool) -> Iterator[LeftRow]:
    """Explain every family: a row for the whole model, and one for each keeper that is not small."""
    for name, (make, batch) in families(*(128, 4, 64) if tiny else (256, 8, 128)).items():
        torch.manual_seed(0)
        found = explain(make(), batch)
        yield LeftRow(name, ALL, exact=found.before, value=found.after, share=found.after / found.before)
        for keeper in found.remaining:
            if keeper.share >= LEAST:
                modules = keeper.modules or "(model)"
                yield LeftRow(
                    name, modules, exact=found.before, value=keeper.bytes, share=keeper.share, reason=keeper.reason
                )


def families(width: int, batch: int, length: int) -> dict[str, Family]:
    """Make two-layer models of ten families, and a batch for each.

    Args:
        width: Of the hidden states.
        batch: Sequences.
        length: Tokens in each.

    Returns:
        Name to a function that makes the model, and its batch.
    """
    import transformers

    heads = width // 32
    sizes = {"vocab_size": VOCABULARY, "hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": heads}
    encoder = {**sizes, "intermediate_size": 4 * width, "max_position_embeddings": length + 2}
    decoder = {**encoder, "num_key_value_heads": heads // 2, "intermediate_size": 8 * width // 3}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    relative = {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": length // 2,
        "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0,
    }  # fmt: skip
    gpt = {"vocab_size": VOCABULARY, "n_embd": width, "n_layer": 2, "n_head": heads, "n_positions": length}
    t5 = {"vocab_size": VOCABULARY, "d_model": width, "d_kv": 32, "d_ff": 4 * width, "num_layers": 2}
    image = {"image_size": 16 * round(length**0.5), "hidden_size": width, "num_hidden_layers": 2}
    speech: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": width, "num_mel_bins": 80}
    for part in ("encoder", "decoder"):
        speech |= {f"{part}_layers": 2, f"{part}_attention_heads": heads, f"{part}_ffn_dim": 4 * width}
    speech |= {"max_source_positions": length, "max_target_positions": length, "decoder_start_token_id": 1}

    made: dict[str, tuple[str, str, dict[str, Any]]] = {
        "RoBERTa": ("RobertaForSequenceClassification", "RobertaConfig", encoder),
        "BERT": ("BertForSequenceClassification", "BertConfig", encoder),
        "DeBERTa": ("DebertaV2ForSequenceClassification", "DebertaV2Config", encoder | relative),
        "GPT-2": ("GPT2LMHeadModel", "GPT2Config", gpt | ends),
        "LLaMA": ("LlamaForCausalLM", "LlamaConfig", decoder),
        "Qwen": ("Qwen2ForCausalLM", "Qwen2Config", decoder),
        "Mistral": ("MistralForCausalLM", "MistralConfig", decoder | {"sliding_window": length // 2}),
        "T5": ("T5ForConditionalGeneration", "T5Config", t5 | {"num_heads": heads, "decoder_start_token_id": 0}),
        "ViT": ("ViTForImageClassification", "ViTConfig", image | {"num_attention_heads": heads}),
        "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig", speech | ends),
    }
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, VOCABULARY, (batch, length), generator=generator)
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    size = int(image["image_size"])
    pixels = torch.randn(batch, 3, size, size, generator=generator)
    features = torch.randn(batch, 80, 2 * length, generator=generator)
    inputs = {"ViT": {"pixel_values": pixels}, "Whisper": {"input_features": features}}
    found: dict[str, Family] = {}
    for name, (model, config, options) in made.items():
        labels = ids[:, 0] % 2 if model.endswith("Classification") else ids.clone()
        kinds = getattr(transformers, model), getattr(transformers, config)
        found[name] = (lambda kinds=kinds, options=options: kinds[0](kinds[1](**options)).train()), {
            **inputs.get(name, text), "labels": labels
        }  # fmt: skip
    return found
