"""What whole blocks save, and the noise of it, by operation.

``bytes`` counts what autograd saves of a forward pass, exactly and with the operations converted one after the other.
``noise`` trains MiniLM as RoBERTa for a few exact steps on GLUE tasks, and a random RoBERTa and LLaMA of 12 and 24
layers on tokens of a Markov chain, and measures the noise of the whole gradient on the next batch. ``left`` explains
what ten families of models still save that is not compressed: two layers with random weights, in training mode, with
their loss and their own dropout. ``presets`` has the noise of every quality through training. ``images`` times
training steps of ResNet-50 and ConvNeXt-T, exact and converted ones in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.library import LEARNING_STEPS, OPERATIONS
from benchmarks.noise.presets import measure_presets
from benchmarks.records import Origin, add_output, origin, show, write_rows
from benchmarks.suites.models import build, twin
from rmm_linear import convert, revert
from rmm_linear.memory import explain, track_saved
from rmm_linear.variance import gradient_noise


def roberta(dropout: float, layers: int = 12, width: int = 768, vocabulary: int = 50265) -> nn.Module:
    """Make RoBERTa-base's shape with random weights, as a classifier."""
    return build(
        "Roberta", "ForSequenceClassification", vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=width // 64, intermediate_size=4 * width, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, max_position_embeddings=514,
    ).train()  # fmt: skip


def llama(layers: int = 12, width: int = 768, vocabulary: int = 32_000) -> nn.Module:
    """Make a small LLaMA with random weights: SwiGLU, RMSNorm, RoPE, three queries for each key."""
    return build(
        "Llama", "ForCausalLM", vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=max(1, width // 192), intermediate_size=8 * width // 3,
        max_position_embeddings=2048, use_cache=False,
    ).train()  # fmt: skip


def with_lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    return get_peft_model(model, config)  # pyright: ignore[reportArgumentType]


def cases(tiny: bool) -> list[tuple[str, Callable[[], nn.Module], tuple[int, int], torch.dtype]]:
    """Title, model, batch and sequence, and dtype."""
    size = SMALL if tiny else {}
    encoder, decoder = ((2, 128), (2, 128)) if tiny else ((8, 128), (4, 256))
    found: list[Any] = [
        (f"roberta-base, {title}", partial(roberta, p, **size), encoder, dtype)
        for dtype in (torch.float32, torch.bfloat16)
        for title, p in (("dropout 0.1", 0.1), ("no dropout", 0.0))
    ]
    found.append(("llama", partial(llama, **size), decoder, torch.float32))
    found.append(("llama, LoRA on q and v", lambda: with_lora(llama(**size)), decoder, torch.float32))
    return found[1::4] if tiny else found


SMALL: dict[str, Any] = {"layers": 2, "width": 128, "vocabulary": 1000}


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
    with track_saved(model) as ledger:
        loss = model(**batch).loss
    count = ledger.total
    del loss
    return count


LEAST = 0.02  # share of what the exact model saves, from which on a keeper has a row
VOCABULARY = 1000
ALL = "all"  # instead of the name of modules

Family = tuple[Callable[[], nn.Module], dict[str, Tensor]]


@dataclass(frozen=True)
class LeftRow(Origin):
    """What some modules of one model save after the conversion that is not compressed."""

    case: str  # name of the family
    modules: str  # name of the modules, numbers replaced by *, or "all" for the whole model
    dtype: str = "float32"  # dtype of the model
    exact: int = 0  # bytes that the exact model saves, all of it
    value: int = 0  # bytes that the modules save
    share: float = 0.0  # ``value`` by ``exact``
    reason: str = ""  # why they do


def measure_left(tiny: bool) -> Iterator[LeftRow]:
    """Explain every family: a row for the whole model, and one for each keeper that is not small."""
    for name, (make, batch) in families(*(128, 4, 64) if tiny else (256, 8, 128)).items():
        torch.manual_seed(0)
        found = explain(make(), batch)
        yield LeftRow(name, ALL, exact=found.before, value=found.after, share=found.after / found.before)
        for keeper in found.remaining:
            if keeper.share >= LEAST:
                left = {"value": keeper.bytes, "share": keeper.share, "reason": keeper.reason}
                yield LeftRow(name, keeper.modules or "(model)", exact=found.before, **left)


def families(width: int, batch: int, length: int) -> dict[str, Family]:
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

    classes, causal, answers = "ForSequenceClassification", "ForCausalLM", "ForConditionalGeneration"
    made: dict[str, tuple[str, str, dict[str, Any]]] = {
        "RoBERTa": ("Roberta", classes, encoder),
        "BERT": ("Bert", classes, encoder),
        "DeBERTa": ("DebertaV2", classes, encoder | relative),
        "GPT-2": ("GPT2", "LMHeadModel", gpt | ends),
        "LLaMA": ("Llama", causal, decoder),
        "Qwen": ("Qwen2", causal, decoder),
        "Mistral": ("Mistral", causal, decoder | {"sliding_window": length // 2}),
        "T5": ("T5", answers, t5 | {"num_heads": heads, "decoder_start_token_id": 0}),
        "ViT": ("ViT", "ForImageClassification", image | {"num_attention_heads": heads}),
        "Whisper": ("Whisper", answers, speech | ends),
    }
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, VOCABULARY, (batch, length), generator=generator)
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    size = int(image["image_size"])
    pixels = torch.randn(batch, 3, size, size, generator=generator)
    features = torch.randn(batch, 80, 2 * length, generator=generator)
    inputs = {"ViT": {"pixel_values": pixels}, "Whisper": {"input_features": features}}
    found: dict[str, Family] = {}
    for name, (kind, head, options) in made.items():
        labels = ids[:, 0] % 2 if head.endswith("Classification") else ids.clone()
        make = partial(build, kind, head, **options)
        found[name] = (lambda make=make: make().train()), {**inputs.get(name, text), "labels": labels}
    return found


def rss_of(step: Callable[[], object]) -> int:
    """Return how far a step raises the peak of the resident set of this process, on Linux."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from the current size
    before = process_bytes("VmRSS")
    step()
    return process_bytes("VmHWM") - before


def process_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@dataclass(frozen=True)
class BlockRow(Origin):
    """One model with some operations converted."""

    what: str  # "bytes", "noise" or "steps"
    case: str  # title of the case
    operations: str  # what is converted, or "exact"
    dtype: str = "float32"  # dtype of the model
    value: float = 0.0  # bytes saved; D² / D²_SGD of the whole gradient; or seconds of a step
    relative: float | None = None  # bytes or seconds by the exact model's
    median: float | None = None  # for noise, the median over the weights
    first: float | None = None  # for noise, the first layer's
    seed: int = 0  # seed of the run


def measure_bytes(tiny: bool) -> Iterator[BlockRow]:
    """Count saved bytes of every case: exact, the operations one after the other, and all but linears."""
    for title, make, shape, dtype in cases(tiny):
        torch.manual_seed(0)
        model = make().to(dtype)
        batch = inputs(model, *shape)
        kind = str(dtype).removeprefix("torch.")
        exact = saved(model, batch)
        yield BlockRow("bytes", title, "exact", kind, exact, 1.0)
        sets = [OPERATIONS[:count] for count in range(1, len(OPERATIONS) + 1)]
        for operations in [*sets, OPERATIONS[1:]]:
            convert(model, operations=operations)
            for _ in range(LEARNING_STEPS + 1):
                model(**inputs(model, 2, 66)).loss.backward()  # more than min_rows
            count = saved(model, batch)
            revert(model)
            yield BlockRow("bytes", title, " ".join(operations), kind, count, count / exact)


def measure_noise(data: Path | None, draws: int, tiny: bool) -> Iterator[BlockRow]:
    """Measure the noise of GLUE tasks, and of random deep models after 200 steps."""
    from benchmarks.noise.glue import load_glue  # needs transformers and datasets

    for task in ("sst2", "cola", "stsb") if data is not None else ():
        model, batches = load_glue(task, data, batch=64, steps=25, max_length=128, seed=0)  # pyright: ignore[reportArgumentType]
        yield from _noise(task, model, batches, draws)
    for title, make in (("roberta", partial(roberta, 0.1)), ("llama", llama)):
        for layers in (2,) if tiny else (12, 24):
            torch.manual_seed(0)
            model = make(layers=layers, width=128, vocabulary=1000)
            batches = [inputs(model, 16, 64, seed) for seed in range(3 if tiny else 201)]
            yield from _noise(f"{title}, {layers} layers", model, batches, draws)


def _noise(title: str, model: nn.Module, batches: list[dict[str, Any]], draws: int) -> Iterator[BlockRow]:
    from benchmarks.noise.glue import train

    train(model, batches[:-1])
    convert(model)
    for batch in batches[: LEARNING_STEPS + 1]:
        model(**batch).loss.backward()
    found = gradient_noise(model, batches[-1], draws=draws)
    revert(model)
    print(f"{title}:\n{found}", flush=True)
    for operation in found.stand_ins:
        first = next((value for block, value in found.by_depth(operation).items() if block.endswith(".0")), None)
        value, median = found.whole(operation), found.median_of_weights(operation)
        yield BlockRow("noise", title, operation, value=value, median=median, first=first)


def measure_images(rounds: int, tiny: bool) -> Iterator[BlockRow]:
    """Time steps of ResNet-50 and ConvNeXt-T, in both memory formats, exact, by operation and with everything."""
    import transformers

    sizes, side = ({"depths": [1, 1], "hidden_sizes": [16, 32]}, 32) if tiny else ({}, 160)
    small = {"embedding_size": 8} if tiny else {}
    kinds = {
        "resnet-50": lambda: transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes, **small)),  # pyright: ignore[reportArgumentType]
        "convnext-t": lambda: transformers.ConvNextForImageClassification(
            transformers.ConvNextConfig(**sizes, num_stages=len(sizes.get("depths", range(4))))  # pyright: ignore[reportArgumentType]
        ),
    }
    for title, make in kinds.items():
        norm = ("norm", "pooling") if title == "resnet-50" else ("linear", "norm")
        settings = (), ("convolution",), norm, ("activation",), OPERATIONS
        for name, like in (("channels first", torch.contiguous_format), ("channels last", torch.channels_last)):
            torch.manual_seed(0)
            model = make().train().to(memory_format=like)  # pyright: ignore[reportCallIssue, reportArgumentType]
            pixels = torch.randn(4, 3, side, side).contiguous(memory_format=like)
            batch = {"pixel_values": pixels, "labels": torch.tensor([0, 1, 0, 1])}
            yield from _in_turns("images", f"{title}, 4 x 3 x {side}², {name}", model, batch, settings, rounds)


def _in_turns(
    what: str,
    title: str,
    model: nn.Module,
    batch: Mapping[str, Any],
    settings: Sequence[tuple[str, ...]],
    rounds: int,
) -> Iterator[BlockRow]:
    """Time steps of a model and its conversions, the exact one first, in turns: the thread's time, not the clock's."""
    models = {settings[0]: model}
    for setting in settings[1:]:
        models[setting] = twin(model)
        convert(models[setting], operations=setting)
    seconds: dict[tuple[str, ...], list[float]] = {setting: [] for setting in settings}
    for turn in range(-4, rounds):  # the first three steps of a converted model measure
        for setting in settings if turn % 2 else reversed(settings):
            began = time.thread_time()
            models[setting](**batch).loss.backward()
            if turn >= 0:
                seconds[setting].append(time.thread_time() - began)
            models[setting].zero_grad(set_to_none=False)
    for setting in settings:
        ratio = statistics.median(a / b for a, b in zip(seconds[setting], seconds[settings[0]], strict=True))
        value = statistics.median(seconds[setting])
        yield BlockRow(what, title, " ".join(setting) or "exact", value=value, relative=ratio)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=tuple(_MEASURES))
    parser.add_argument("--data_dir", type=Path, help="folder with the official GLUE files, for noise")
    parser.add_argument("--draws", type=int, default=4, help="gradients per setting, for noise")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps per setting")
    add_output(parser)


def run(arguments: argparse.Namespace) -> Iterator[str]:
    about, rows = origin("cpu", arguments.commit), list[Origin]()
    for row in _MEASURES[arguments.what](arguments):
        rows.append(replace(row, **about))
        yield show(rows[-1:]).splitlines()[-1]
    write_rows(arguments.out / f"blocks-{arguments.what}.csv", rows)
    yield show(rows)


_MEASURES: dict[str, Callable[[argparse.Namespace], Iterator[Any]]] = {
    "bytes": lambda asked: measure_bytes(asked.tiny),
    "left": lambda asked: measure_left(asked.tiny),
    "noise": lambda asked: measure_noise(asked.data_dir, asked.draws, asked.tiny),
    "presets": lambda asked: measure_presets(asked.data_dir, asked.draws, asked.tiny),
    "images": lambda asked: measure_images(asked.rounds, asked.tiny),
}
