"""What whole blocks save, and the noise of it, by operation: ``python -m benchmarks.blocks --help``.

``bytes`` counts what autograd saves of a forward pass, exactly and with the operations converted one after the other.
``noise`` trains MiniLM as RoBERTa for a few exact steps on GLUE tasks, and a random RoBERTa and LLaMA of 12 and 24
layers on tokens of a Markov chain, and measures the noise of the whole gradient on the next batch.
``left`` explains what ten families of models still save that is no stand-in, see ``benchmarks/left.py``.
``steps`` times training steps, exact and converted ones in turns, and their peak of live bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.left import LeftRow, measure_left
from benchmarks.noise import load_glue
from benchmarks.records import RESULTS, Origin, origin, write_rows
from rmm_linear import RMMConfig, convert, revert
from rmm_linear._support.tables import table
from rmm_linear.config import OPERATIONS
from rmm_linear.memory import peak, track_saved
from rmm_linear.variance import gradient_noise

LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


@dataclass(frozen=True)
class BlockRow(Origin):
    """One model with some operations converted.

    Attributes:
        what: "bytes", "noise" or "steps".
        case: Title of the case.
        operations: What is converted, or "exact".
        dtype: dtype of the model.
        value: Bytes saved; D² / D²_SGD of the whole gradient; or seconds of a step.
        relative: Bytes or seconds by the exact model's.
        median: For noise, the median over the weights.
        first: For noise, the first layer's.
        peak_bytes: For steps, the peak of live bytes.
        seed: Seed of the run.
    """

    what: str
    case: str
    operations: str
    dtype: str = "float32"
    value: float = 0.0
    relative: float | None = None
    median: float | None = None
    first: float | None = None
    peak_bytes: int | None = None
    seed: int = 0


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
    return [
        ("roberta-base, dropout 0.1", lambda: roberta(0.1, **size), encoder, torch.float32),
        ("roberta-base, no dropout", lambda: roberta(0.0, **size), encoder, torch.float32),
        ("roberta-base, dropout 0.1", lambda: roberta(0.1, **size), encoder, torch.bfloat16),
        ("roberta-base, no dropout", lambda: roberta(0.0, **size), encoder, torch.bfloat16),
        ("llama", lambda: llama(**size), decoder, torch.float32),
        ("llama, LoRA on q and v", lambda: with_lora(llama(**size)), decoder, torch.float32),
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
            count = saved(model, batch)
            revert(model)
            yield BlockRow("bytes", title, " ".join(operations), kind, count, count / exact)


def saved(model: nn.Module, batch: Mapping[str, Any]) -> int:
    """Bytes that autograd saves of one forward pass."""
    with track_saved(model) as ledger:
        loss = model(**batch).loss
    count = ledger.total
    del loss
    return count


def measure_noise(data: Path | None, draws: int, tiny: bool) -> Iterator[BlockRow]:
    """Measure the noise of GLUE tasks, and of random deep models after 200 steps."""
    for task in ("sst2", "cola", "stsb") if data is not None else ():
        model, batches = load_glue(task, data, batch=64, steps=25, max_length=128, seed=0)  # pyright: ignore[reportArgumentType]
        yield from _noise(task, model, batches, draws)
    deep = {"width": 128, "vocabulary": 1000}
    for title, make in (
        ("roberta", lambda layers: roberta(0.1, layers, **deep)),
        ("llama", lambda n: llama(n, **deep)),
    ):
        for layers in (2,) if tiny else (12, 24):
            torch.manual_seed(0)
            model = make(layers)
            steps = 2 if tiny else 200
            batches = [inputs(model, 16, 64, seed) for seed in range(steps + 1)]
            yield from _noise(f"{title}, {layers} layers", model, batches, draws)


def _noise(title: str, model: nn.Module, batches: list[dict[str, Any]], draws: int) -> Iterator[BlockRow]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for batch in batches[:-1]:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    found = gradient_noise(model, batches[-1], RMMConfig(), draws=draws)
    print(f"{title}:\n{found}", flush=True)
    for operation in found.stand_ins:
        first = next((value for block, value in found.by_depth(operation).items() if block.endswith(".0")), None)
        yield BlockRow(
            "noise",
            title,
            operation,
            value=found.whole(operation),
            median=found.median_of_weights(operation),
            first=first,
        )


def measure_steps(rounds: int, tiny: bool) -> Iterator[BlockRow]:
    """Time steps of RoBERTa-base's shape, exact, with linears alone and with everything, in turns; and their peaks."""
    size: dict[str, Any] = {"layers": 2, "width": 128, "vocabulary": 1000} if tiny else {"layers": 4}
    for dropout, shape in ((0.1, (8, 128)), (0.0, (8, 128)), (0.1, (2, 512)), (0.0, (2, 512))):
        torch.manual_seed(0)
        model = roberta(dropout, **size)
        batch = inputs(model, *shape)
        settings: list[tuple[str, ...]] = [(), OPERATIONS[:1], OPERATIONS]
        seconds: dict[tuple[str, ...], list[float]] = {setting: [] for setting in settings}
        peaks: dict[tuple[str, ...], int] = {}
        for turn in range(rounds + 1):
            for setting in settings if turn % 2 else reversed(settings):
                if setting:
                    convert(model, operations=setting)
                if turn:
                    began = time.thread_time()
                    model(**batch).loss.backward()
                    seconds[setting].append(time.thread_time() - began)
                else:
                    with peak() as found:
                        model(**batch).loss.backward()
                    peaks[setting] = found.bytes
                model.zero_grad(set_to_none=False)
                if setting:
                    revert(model)
        title = f"roberta-base, 4 layers, {shape[0]} x {shape[1]}, dropout {dropout}"
        exact = seconds[()]
        for setting in settings:
            ratio = statistics.median(a / b for a, b in zip(seconds[setting], exact, strict=True))
            name = " ".join(setting) or "exact"
            value = statistics.median(seconds[setting])
            yield BlockRow("steps", title, name, value=value, relative=ratio, peak_bytes=peaks[setting])


def main(argv: list[str] | None = None) -> int:
    """Run the command; ``argv`` are its arguments, None takes those of the process. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blocks", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("what", choices=("bytes", "left", "noise", "steps"))
    parser.add_argument("--data_dir", type=Path, help="folder with the official GLUE files, for noise")
    parser.add_argument("--draws", type=int, default=4, help="gradients per setting, for noise")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps per setting")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the csv files")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the command")
    arguments = parser.parse_args(argv)
    if arguments.what == "bytes":
        rows = measure_bytes(arguments.tiny)
    elif arguments.what == "left":
        rows = measure_left(arguments.tiny)
    elif arguments.what == "noise":
        rows = measure_noise(arguments.data_dir, arguments.draws, arguments.tiny)
    else:
        rows = measure_steps(arguments.rounds, arguments.tiny)
    where = origin("cpu")
    found: list[BlockRow | LeftRow] = []
    columns = ("case", "dtype", "operations", "value", "relative", "median", "first", "peak_bytes")
    if arguments.what == "left":
        columns = ("case", "modules", "exact", "value", "share", "reason")
    for row in rows:
        found.append(replace(row, **where))
        print(" ".join(filter(None, (_cell(getattr(row, name)) for name in columns))), flush=True)
    write_rows(arguments.out / f"blocks-{arguments.what}.csv", found)
    print(table(columns, [tuple(_cell(getattr(row, name)) for name in columns) for row in found]))
    return 0


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | int) else str(value or "")


if __name__ == "__main__":
    sys.exit(main())
