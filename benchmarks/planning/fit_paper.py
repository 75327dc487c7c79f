"""How far LLaMAs of 8 and 70 billion weights get on 1 to 64 devices of 80 GB, without weights and without the devices.

Every step is simulated on a model on the meta device. Bytes are the maximum, over the moments of a step, of what grows
by a line with the size of the batch: a convex function. So a secant finds the largest size, and a size is known to be
the largest if the line through it and a smaller one exceeds the memory at the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
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
    "3b": _shape(3072, 8192, layers=28, heads=24, pairs=8, words=128256),
    "1.1b": _shape(2048, 5632, layers=22, heads=32, pairs=4, words=32000),
    "tiny": _shape(64, 192, layers=3, heads=4, pairs=2, words=512),
}
GB_ON_HOST = 240  # for each device: 1.9 TB for eight
# Memory, how a step is divided, and the number of devices.
PLACES: dict[str, tuple[str, library.Shards | None, int]] = {
    "1 x 80 GB": ("80GB", None, 1),
    "8 x 80 GB": ("80GB", library.Shards(8), 8),
    "8 x 80 GB, one sequence": ("80GB", library.Shards(8, context=8), 8),
    "8 x 80 GB, one sequence, offloaded": ("80GB", library.Shards(8, cpu_offload=True, context=8), 8),
    "64 x 80 GB, one sequence": ("80GB", library.Shards(64, context=64), 64),
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
MEASURED = 32768  # tokens of a rank's sequence that a step is measured with first
SEED = 0
LARGE = ("8b", "70b")
METHODS = ("exact", "checkpointed", "chunked", "packed", "fitted")
EXACT = ("keep", "recompute", "offload", "tile")
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
    tokens: int = 0  # of a step of all devices with it
    peak: int | None = None  # bytes of the training process with it
    host: int = 0  # bytes that wait in the host's memory
    memory: int = 0  # the device's, bytes
    needed: int = 0  # bytes at the optimizer's step: all of the following but "transient"
    parameters: int = 0  # bytes of the parameters
    gradients: int = 0  # bytes of the gradients
    optimizer: int = 0  # bytes of the optimizer's state
    gathered: int = 0  # bytes that ``fully_shard`` holds unsharded
    transient: int = 0  # bytes that AdamW's step would make in addition without ``fused=True``
    plan: str = ""  # how many blocks have each option
    seconds: float = 0.0  # time of all methods
    seed: int = SEED  # of the random numbers, on which no byte depends


def place(model: str, device: str) -> Iterator[dict[str, Any]]:
    """Find the longest sequences of a model on some devices, with all weights trained and with adapters.

    Adapters are not offloaded: their gradients and state are small.
    """
    memory, shards, devices = PLACES[device]
    torch.manual_seed(SEED)
    for trained, make in (("all", llama), ("LoRA", with_adapters)):
        if trained == "LoRA" and shards is not None and shards.cpu_offload:
            continue
        begin, found = time.perf_counter(), make(MODELS[model])
        for row in rows(found, library.read_bytes("memory", memory), shards):
            common = {"model": model, "trained": trained, "place": device, "seconds": time.perf_counter() - begin}
            yield {**common, "tokens": row.get("sequence", 0) * devices // (shards.context if shards else 1), **row}


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
    found = by_method(model, memory, shards)
    yield from ({"method": method, **common, **found[method]} for method in METHODS)


def by_method(model: nn.Module, memory: int, shards: library.Shards | None) -> dict[str, dict[str, Any]]:
    context = shards.context if shards else 1
    best = library.max_length(
        model, texts(1, GRAIN), memory, optimizer=ADAMW, allow=EXACT, host_memory=f"{GB_ON_HOST}GB",
        shards=shards, multiple=GRAIN, progress=False,
    )  # fmt: skip
    found: dict[str, dict[str, Any]] = {
        "exact": {"sequence": best.exact},
        "checkpointed": {"sequence": best.checkpointed},
        "fitted": {"sequence": best.length, "peak": best.peak, "host": best.host_bytes},
    }
    if best.plan is not None:
        found["fitted"]["plan"] = counts(best.plan.blocks)
    with library.quiet(), library.divided(model, shards):
        work = library.Fitting(model, texts(1, MEASURED), memory, optimizer=ADAMW, shards=shards)
        for method, plan in plans(work).items():
            found[method] = longest(work, plan, context)
    return found


def plans(work: library.Fitting) -> dict[str, library.BlockPlan]:
    """Make the plans that are no choice of ``fit`` among exact ones: every block recomputed or packed, with chunks."""
    blocks, conversions = work.costs.blocks, work.candidates.conversions
    known = {setting.name: setting for setting in library.SETTINGS}

    def converted(name: str, setting: str) -> library.PlannedBlock:
        if conversions.chosen(name, known[setting]):
            return library.PlannedBlock(name, library.CONVERT, setting=setting)
        return library.PlannedBlock(name, library.KEEP)

    again = [library.PlannedBlock(one.name, library.KEEP if one.writes_input else library.RECOMPUTE) for one in blocks]
    heads = {one.name for one in blocks if "logits" in conversions.operations[one.name].values()}
    chosen = {
        "chunked": [converted(row.name, "others") if row.name in heads else row for row in again],
        "packed": [converted(one.name, "tenth") for one in blocks],
    }
    return {method: work.proposals.plan_of(rows) for method, rows in chosen.items()}


def longest(work: library.Fitting, plan: library.BlockPlan, context: int) -> dict[str, Any]:
    """Return the longest sequence of a plan, and its peak; like blocks stand for one another but in the last step."""

    def estimate(count: int) -> int:
        example = texts(1, GRAIN * count // context)
        return work.before + replace(work.proposals, example=example).estimate(plan.blocks).bytes

    memory = work.total or 0
    count = largest(estimate, memory, MEASURED // GRAIN * context)
    while count:
        with plan.applied() as planned:
            step = library.watch(planned, texts(1, GRAIN * count // context), held=work.proposals.held)[0]
        if work.before + step.bytes <= memory:
            return {"sequence": GRAIN * count, "peak": work.before + step.bytes, "plan": counts(plan.blocks)}
        count = min(count - 1, count * memory // (work.before + step.bytes))
    return {"plan": counts(plan.blocks)}


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
