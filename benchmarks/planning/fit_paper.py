"""How far LLaMAs of 8 and 70 billion weights get on devices of 24 and 80 GB, without weights and without the devices.

Every step is simulated on a model on the meta device. Bytes are the maximum, over the moments of a step, of what grows
by a line with the size of the batch: a convex function. So a secant finds the largest size, and a size is known to be
the largest if the line through it and a smaller one exceeds the memory at the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from benchmarks import library
from benchmarks.planning.fit_steps import counts
from benchmarks.records import Origin

Shape = Mapping[str, Any]


def _shape(width: int, inner: int, *, layers: int, heads: int, pairs: int, words: int) -> Shape:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": words}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": pairs}


MODELS: dict[str, Shape] = {
    "8b": _shape(4096, 14336, layers=32, heads=32, pairs=8, words=128256),
    "70b": _shape(8192, 28672, layers=80, heads=64, pairs=8, words=128256),
    "tiny": _shape(64, 192, layers=3, heads=4, pairs=2, words=512),
}
PLACES: dict[str, tuple[str, library.Shards | None]] = {
    "1 x 24 GB": ("24GB", None),
    "1 x 80 GB": ("80GB", None),
    "8 x 80 GB": ("80GB", library.Shards(8)),
    "8 x 80 GB, offloaded": ("80GB", library.Shards(8, cpu_offload=True)),
}


def llama(shape: Shape) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig  # not installed where only other parts run

    with torch.device("meta"):
        config = LlamaConfig(**shape, use_cache=False, max_position_embeddings=2**24)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def with_adapters(shape: Shape) -> nn.Module:
    """Add LoRA of rank 16 to all linear layers but the head, all in bfloat16; adapters alone are trained."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        model = get_peft_model(llama(shape), adapters, autocast_adapter_dtype=False)  # pyright: ignore[reportArgumentType]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def texts(batch: int, sequence: int, device: str = "meta") -> dict[str, torch.Tensor]:
    ids = torch.zeros(batch, sequence, dtype=torch.long, device=device)
    return {"input_ids": ids, "labels": ids}


GRAIN = 256  # sequence lengths are multiples of it
SEQUENCE = 4096  # of the batches
MEASURED = 32768  # tokens of the sequence that the options of blocks are measured with
MAX_NOISE = 1.0
SEED = 0
LARGE = ("8b", "70b")
METHODS = ("exact", "checkpointed", "chunked", "packed", "fitted")
ADAMW = partial(AdamW, fused=True)


@dataclass(frozen=True, kw_only=True)
class Paper(Origin):
    """One model on one kind of device with one method. All bytes are those of one device, simulated."""

    model: str  # of :data:`MODELS`
    trained: str  # "all" weights, or "LoRA"
    place: str  # of :data:`PLACES`
    method: str  # of :data:`METHODS`
    status: str = "ok"  # "ok", or "does not fit" if what is needed beside activations exceeds the memory
    sequence: int = 0  # the longest sequence at batch 1; 0 if not even the shortest fits
    sequence_peak: int | None = None  # bytes of the training process with it
    batch: int = 0  # the largest batch of sequences of 4096 tokens
    batch_peak: int | None = None  # bytes of the training process with it
    memory: int = 0  # the device's, bytes
    needed: int = 0  # bytes at the optimizer's step: all of the following but "transient"
    parameters: int = 0  # bytes of the parameters
    gradients: int = 0  # bytes of the gradients
    optimizer: int = 0  # bytes of the optimizer's state
    gathered: int = 0  # bytes that ``fully_shard`` holds unsharded
    transient: int = 0  # bytes that AdamW's step would make in addition without ``fused=True``
    plan: str = ""  # how many blocks have each option
    simulations: int = 0  # number of steps that were simulated for the method, without those that measure options
    seconds: float = 0.0  # time of it, with those
    seed: int = SEED  # of the random numbers, on which no byte depends


def place(model: str, device: str) -> Iterator[dict[str, Any]]:
    """Find the largest sizes of a model on a device, with all weights trained and with adapters.

    Adapters are not offloaded: their gradients and state are small.
    """
    memory, shards = PLACES[device]
    torch.manual_seed(SEED)
    for trained, make in (("all", llama), ("LoRA", with_adapters)):
        if trained == "LoRA" and shards is not None and shards.cpu_offload:
            continue
        for row in rows(make(MODELS[model]), library.read_bytes("memory", memory), shards):
            yield {"model": model, "trained": trained, "place": device, **row}


def rows(model: nn.Module, memory: int, shards: library.Shards | None) -> Iterator[dict[str, Any]]:
    static = library.static_memory(model, ADAMW, shards)
    needed = static.before_step + static.gradients
    common = {
        "memory": memory,
        "needed": needed,
        **{name: getattr(static, name) for name in ("parameters", "gradients", "optimizer", "gathered")},
        "transient": library.static_memory(model, AdamW, shards).optimizer_transient,
    }
    if needed >= memory:
        yield from ({"method": method, "status": "does not fit", **common} for method in METHODS)
        return
    with library.quiet():
        begin = time.perf_counter()
        work = library.Fitting(model, texts(1, MEASURED), memory, optimizer=ADAMW, shards=shards)
        work.add_options(MAX_NOISE)
        for row in by_method(work):
            yield {**common, **row, "seconds": time.perf_counter() - begin}
            begin = time.perf_counter()


def by_method(work: library.Fitting) -> Iterator[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for method, plan in plans(work).items():
        found.append(_Sizes(work, plan).row())
        if method == "fitted":  # which may do what the others do
            furthest = max(reversed(found), key=lambda row: (row["sequence"], row["batch"]))
            found[-1] |= {name: furthest[name] for name in ("sequence", "sequence_peak", "batch", "batch_peak", "plan")}
        yield {"method": method, **found[-1]}


def plans(work: library.Fitting) -> dict[str, library.BlockPlan]:
    blocks, conversions = work.costs.blocks, work.candidates.conversions
    known = {setting.name: setting for setting in library.SETTINGS}

    def converted(name: str, setting: str) -> library.PlannedBlock:
        if conversions.chosen(name, known[setting]):
            return library.PlannedBlock(name, library.CONVERT, setting=setting)
        return library.PlannedBlock(name, library.KEEP)

    again = [library.PlannedBlock(one.name, library.KEEP if one.writes_input else library.RECOMPUTE) for one in blocks]
    heads = {one.name for one in blocks if "logits" in conversions.operations[one.name].values()}
    chosen = {
        "exact": [library.PlannedBlock(one.name, library.KEEP) for one in blocks],
        "checkpointed": again,
        "chunked": [converted(row.name, "others") if row.name in heads else row for row in again],
        "packed": [converted(one.name, "tenth") for one in blocks],
    }
    options = work.proposals.options
    indices = library.choose(options, library.least(options), work.cost, solver="rounded") or []
    chosen["fitted"] = [rows[index] for rows, index in zip(work.proposals.rows, indices, strict=True)]
    return {method: work.proposals.plan_of(rows) for method, rows in chosen.items()}


class _Sizes:
    def __init__(self, work: library.Fitting, plan: library.BlockPlan) -> None:
        self.work, self.plan = work, plan
        self.known: dict[tuple[int, int], int] = {}  # batch and sequence to bytes

    def peak(self, batch: int, sequence: int) -> int:
        if (batch, sequence) not in self.known:
            with self.plan.applied() as planned:
                step = library.watch(planned, texts(batch, sequence), held=self.work.proposals.held)[0]
            self.known[batch, sequence] = self.work.before + step.bytes
        return self.known[batch, sequence]

    def row(self) -> dict[str, Any]:
        """The sizes, their peaks, and what it took to find them."""
        memory = self.work.total or 0
        length = GRAIN * largest(lambda count: self.peak(1, GRAIN * count), memory, SEQUENCE // GRAIN)
        batch = length // SEQUENCE
        batch = largest(lambda count: self.peak(count, SEQUENCE), memory, batch) if batch else 0
        return {
            "sequence": length,
            "sequence_peak": self.peak(1, length) if length else None,
            "batch": batch,
            "batch_peak": self.peak(batch, SEQUENCE) if batch else None,
            "plan": counts(self.plan.blocks),
            "simulations": len(self.known),
        }


def largest(bytes_of: Callable[[int], int], memory: int, guess: int) -> int:
    """Find the largest size that fits, where bytes are a convex function of it."""
    known: dict[int, int] = {}
    low, high = 0, None
    while high is None or high - low > 1:
        known[guess] = bytes_of(guess)
        low, high = (guess, high) if known[guess] <= memory else (low, guess)
        lesser = max((size for size in known if size < low), default=None)
        if lesser is not None and known[low] + (known[low] - known[lesser]) / (low - lesser) > memory:
            break  # beyond a size, a convex function rises at least as fast as before
        guess = _next(known, memory, low, high)
    return low


def _next(known: Mapping[int, int], memory: int, low: int, high: int | None) -> int:
    """Where the line through the two largest sizes, or one and none, meets the memory, between what is known."""
    (less, there), (more, bytes_) = sorted(known.items())[-2:] if len(known) > 1 else [(0, 0), *known.items()]
    slope = (bytes_ - there) / (more - less)
    size = int(more + (memory - bytes_) / slope) if slope > 0 else 2 * more
    return max(low + 1, size if high is None else min(size, high - 1))
