"""Section ``steps`` of ``python -m benchmarks gpu``: forward and backward pass of blocks as users train them.

Two blocks of RoBERTa-base, LLaMA-1B, Gemma-2-2B (eager attention, for its softcap) and a small Mixtral in bfloat16,
without embeddings and optimizer, on 16,384 tokens: exact, checkpointed, checkpointed with what is kept on the host, and
converted. Every method runs in a process of its own. A
step takes the larger of what the host and what the device take, so both are there: the host's is the time until a step
is issued, the device's the sum of its kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.processes import ProcessError, call, last_line
from benchmarks.records import Origin, origin, write_rows
from benchmarks.suites.models import build, check_transformers, checkpoint
from rmm_linear import RMMConfig, convert

NAME = "steps"
_WARM_UP = 7  # by then, modules have learned what they learn
_SIZES: dict[str, dict[str, Any]] = {
    "roberta": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
    "llama-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "gemma2-2b": {
        "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4,
    },
    "mixtral": {
        "hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip
_TINY: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
METHODS: dict[str, Callable[[nn.Module], object]] = {
    "exact": lambda model: None,
    "checkpointing": checkpoint,
    "checkpointing, offloaded": checkpoint,
    "default": lambda model: convert(model),
    "default, fused": lambda model: convert(model, RMMConfig(fused=True)),
    "smallest": lambda model: convert(model, quality="smallest"),
    "a tenth of the rows, 16 bits": lambda model: convert(model, RMMConfig(kind="countsketch", ratio=0.1, bits=None)),
}


@dataclass(frozen=True, kw_only=True)
class Step(Origin):
    """Two blocks with one method."""

    case: str  # model, shape, dropout of hidden states and of attention, "padded" with a mask
    method: str  # title of the method
    status: str = "ok"  # "ok", or why there is no time
    step: float | None = None  # seconds of both passes, the median
    host: float | None = None  # seconds until they are issued, the median
    busy: float | None = None  # seconds of the kernels, one step
    launches: int | None = None  # kernels, and copies and fills, of one step
    saved: int | None = None  # bytes alive between the passes
    peak: int | None = None  # bytes allocated at most in a step, beyond parameters and input
    slowest: str = ""  # the three kernels that take longest: name, number, milliseconds together
    rounds: int = 0  # steps that were timed


@dataclass(frozen=True)
class Blocks:
    """What is measured."""

    name: str
    batch: int
    tokens: int
    dropout: float = 0.0
    attention_dropout: float = 0.0
    is_padded: bool = False

    @property
    def title(self) -> str:
        """The case's name in tables."""
        parts = [f"{self.name} {self.batch} x {self.tokens} x 2"]
        parts += [f"dropout {self.dropout}, of attention {self.attention_dropout}"] * (self.dropout > 0)
        return ", ".join(parts + ["padded"] * self.is_padded)


CASES = (
    Blocks("roberta", 32, 512, 0.1, 0.1),
    Blocks("roberta", 32, 512, 0.1, 0.0),
    Blocks("roberta", 32, 512, 0.1, 0.1, is_padded=True),
    Blocks("llama-1b", 4, 4096),
    Blocks("gemma2-2b", 8, 2048),
    Blocks("mixtral", 4, 4096),
)
TINY = (Blocks("roberta", 2, 8, 0.1, 0.1), *(Blocks(name, 2, 8) for name in ("llama-1b", "gemma2-2b", "mixtral")))


def run_steps(path: Path, device: str, *, tiny: bool, timeout: float, commit: str) -> list[Step]:
    """Measure every method of every case, and write the rows so far after each."""
    check_transformers(NAME)
    about, rows, end = origin(device, commit), [], time.monotonic() + timeout
    for blocks in TINY if tiny else CASES:
        for method in METHODS:
            left = end - time.monotonic()
            try:
                row = call(measure, blocks, method, device, timeout=max(1.0, left))
            except ProcessError as error:
                row = Step(case=blocks.title, method=method, status=last_line(error))
            rows.append(dataclasses.replace(row, **about))
            write_rows(path, rows)
    return rows


def measure(blocks: Blocks, method: str, device: str, rounds: int = 9) -> Step:
    """Time steps of one method, and look at one more."""
    model, mask = _model(blocks, device), None
    METHODS[method](model)
    torch.manual_seed(1)
    width = model.config.hidden_size
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(blocks.batch, blocks.tokens, width, device=device, dtype=dtype).requires_grad_()
    if blocks.is_padded:
        lengths = torch.linspace(0.4, 1, blocks.batch, device=device).mul(blocks.tokens).long().unsqueeze(1)
        mask = (torch.arange(blocks.tokens, device=device) < lengths).long()
    is_offloaded = method.endswith("offloaded")

    def forward() -> torch.Tensor:
        with (
            torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda") if is_offloaded else contextlib.nullcontext()
        ):
            return model(inputs_embeds=x, attention_mask=mask).last_hidden_state

    def step() -> None:
        model.zero_grad()
        x.grad = None
        forward()[..., ::2].float().square().mean().backward()  # of all features, the last norm would make it 0

    for _ in range(_WARM_UP):
        step()
    times, hosts = [], []
    for _ in range(rounds):
        _wait(device)
        begin = time.perf_counter()
        step()
        hosts.append(time.perf_counter() - begin)
        _wait(device)
        times.append(time.perf_counter() - begin)
    row = Step(
        case=blocks.title, method=method, rounds=rounds, step=statistics.median(times), host=statistics.median(hosts)
    )
    return dataclasses.replace(row, **_looked_at(step, forward, model, x)) if device == "cuda" else row


def _looked_at(step: Callable[[], None], forward: Callable[[], torch.Tensor], model: nn.Module, x: Any) -> dict:
    model.zero_grad()
    x.grad = None
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    model.zero_grad()
    x.grad = None
    output = forward()
    saved = torch.cuda.memory_allocated() - before
    del output
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    kernels = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
    kernels = [event for event in kernels if event.self_device_time_total]
    slowest = "; ".join(
        f"{event.key[:40].strip()} {event.count} {event.self_device_time_total / 1e3:.2f}" for event in kernels[:3]
    )
    busy = sum(event.self_device_time_total for event in kernels) / 1e6
    launches = sum(event.count for event in kernels)
    return {"busy": busy, "launches": launches, "saved": saved, "peak": peak, "slowest": slowest}


def _model(blocks: Blocks, device: str) -> Any:
    torch.manual_seed(0)
    sizes = _SIZES[blocks.name] if device == "cuda" else _TINY
    shared = sizes | {"vocab_size": 32, "num_hidden_layers": 2}
    with torch.device(device):
        if blocks.name == "roberta":
            import transformers

            p = {"hidden_dropout_prob": blocks.dropout, "attention_probs_dropout_prob": blocks.attention_dropout}
            config: Any = transformers.RobertaConfig(**shared, **p, max_position_embeddings=blocks.tokens + 2)  # pyright: ignore[reportArgumentType]
            model: Any = transformers.RobertaModel(config, add_pooling_layer=False)
        else:
            kinds = {"llama-1b": "Llama", "gemma2-2b": "Gemma2", "mixtral": "Mixtral"}
            model = build(kinds[blocks.name], "Model", **{"num_key_value_heads": 2} | shared, use_cache=False)
    model.to(torch.bfloat16 if device == "cuda" else torch.float32)
    model.get_input_embeddings().requires_grad_(False)
    model.set_attn_implementation("eager" if blocks.name == "gemma2-2b" else "sdpa")  # sdpa has no softcap
    return model.train()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
