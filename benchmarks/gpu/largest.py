"""Section ``largest`` of ``python -m benchmarks gpu``: the largest batch that a device holds, found by trying.

Whole models train in bfloat16 with AdamW: RoBERTa-base under autocast, and a LLaMA of a billion parameters that is
bfloat16 itself. Attention has no dropout, as in current models: it is where the fast kernels of PyTorch and ours are.
Every method runs in a process of its own. The bytes of two small batches say where the largest should lie; it is tried,
and what is around it. Each is also measured with the batch that is exact training's largest.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.library import LiveTensors, Peak
from benchmarks.planning.fit_paper import MODELS
from benchmarks.processes import ProcessError, call
from benchmarks.records import Origin, origin, write_rows
from benchmarks.suites.models import build, checkpoint
from rmm_linear import RMMConfig, convert

NO_TIME = "no more time"
_PRECISION, _MOST = 16, 64  # the least batch that does not fit is at most a 16th larger; a guess at most 64 times


def largest(peak: Callable[[int], int | None], memory: int, first: int, end: float) -> tuple[int, str]:
    known, high, failures, size, pace = [(0, 0)], None, 0, first, 0.0
    while high is None or high - known[-1][0] > max(1, known[-1][0] // _PRECISION):
        begin, low = time.time(), known[-1][0]
        if begin + pace * size > end:
            return low, f"{NO_TIME}: at least {low}" + ("" if high is None else f", less than {high}")
        try:
            found = peak(size)
        except RuntimeError as error:
            return low, f"with {size}: {first_line(error)}"
        pace = (time.time() - begin) / size
        if found is None:
            high, failures = size, failures + 1
        else:
            known.append((size, found))
        size = _next(known, high, failures, memory)
    return known[-1][0], "ok"


def _next(known: Sequence[tuple[int, int]], high: int | None, failures: int, memory: int) -> int:
    """The batch to try next, of batches that fit with their bytes, and the least that does not."""
    low, least = known[-1][0], known[-1][0] + max(1, known[-1][0] // _PRECISION)
    if high is not None:
        # What should have fitted did not: just below it, and if that does not fit either, halfway.
        return high - max(1, high // (_PRECISION + 1)) if failures == 1 and len(known) > 2 else (low + high) // 2
    if len(known) < 3:
        return 4 * low
    (smaller, fewer), (_, more) = known[-2:]
    slope = (more - fewer) / (low - smaller)
    guess = low + int((memory - more) / slope) if slope > 0 else _MOST * low
    return max(least, min(guess, _MOST * low))


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def is_full(error: RuntimeError) -> bool:
    """Say whether memory was too small: libraries beside PyTorch's allocator have words of their own for it."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "alloc_failed" in text


EXACT = "exact"
_ON_CPU, _FIRST_TINY = 10_000_000, 4  # bytes of a device that is none, to try the command; sequences of 32 tokens
_CHECKPOINT, _CHUNKS, _DEFAULT = "torch checkpoint", "torch checkpoint, loss in chunks", "default"


@dataclass(frozen=True)
class _Model:
    make: Callable[[bool], nn.Module]
    length: int
    first: int
    providers: tuple[str, ...]
    is_half: bool


def _roberta(tiny: bool) -> nn.Module:
    small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 100}
    small |= {"intermediate_size": 128}
    shape = small if tiny else {"vocab_size": 50265, "max_position_embeddings": 514}
    return build("Roberta", "ForSequenceClassification", **shape, attention_probs_dropout_prob=0.0, use_cache=False)


def _llama(tiny: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    billion: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
    billion |= {"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32_000}
    shape: Any = MODELS["tiny"] if tiny else billion
    return AutoModelForCausalLM.from_config(LlamaConfig(**shape, use_cache=False), dtype=torch.bfloat16)


CASES: dict[str, _Model] = {
    "roberta-base": _Model(_roberta, 512, 8, (EXACT, _DEFAULT, _CHECKPOINT), False),
    "llama, 1.1 billion": _Model(_llama, 2048, 1, (EXACT, _DEFAULT, _CHECKPOINT, _CHUNKS), True),
}


class Trial:
    def __init__(self, model: _Model, provider: str, device: str, tiny: bool) -> None:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # what is free fits any size
        torch.manual_seed(0)
        self.device, self.is_half = device, model.is_half
        self.length = 32 if tiny else model.length
        self.memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else _ON_CPU
        with torch.device(device):
            self.model: Any = model.make(tiny).train()
        if provider in (_CHECKPOINT, _CHUNKS):
            checkpoint(self.model)
        if provider in (_CHUNKS, _DEFAULT):
            convert(self.model, RMMConfig(operations=("logits",)) if provider == _CHUNKS else None)
        # The step takes its time and moves nothing.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        self.first = _FIRST_TINY if tiny else model.first
        for _ in range(2):  # until states are there
            self._step(self.first)

    def peak(self, batch: int) -> int | None:
        """Try two steps, the second of which finds what the first has left."""
        if self.device != "cuda":
            live = self._live(batch)
            return live if live <= self.memory else None
        self._clear()
        torch.cuda.reset_peak_memory_stats()
        full = False
        try:
            self._step(batch)
            self._step(batch)
            torch.cuda.synchronize()
        except RuntimeError as error:
            if not is_full(error):
                raise
            full = True
        self._clear()  # after the error is gone, whose frames hold tensors
        return None if full else torch.cuda.max_memory_allocated()

    def measured(self, batch: int, end: float) -> dict[str, Any]:
        if not batch:
            return {}
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = list[float]()
        while len(seconds) < 3 and (not seconds or time.time() + seconds[-1] < end):
            begin = time.perf_counter()
            self._step(batch)
            if self.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        median = statistics.median(seconds)
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else self._live(batch)
        return {"peak": peak, "seconds": median, "tokens_per_second": batch * self.length / median}

    def _step(self, batch: int) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=not self.is_half):
            loss = self.model(**self._batch(batch)).loss
        loss.backward()
        self.optimizer.step()

    def _live(self, batch: int) -> int:
        self._clear()
        with LiveTensors(Peak()) as live:
            self._step(batch)
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        held = sum(tensor.nbytes for tensor in (*self.model.parameters(), *states))
        return held + live.result.bytes

    def _batch(self, batch: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(batch)
        ids = torch.randint(3, self.model.config.vocab_size, (batch, self.length), generator=generator).to(self.device)
        return {"input_ids": ids, "labels": ids if self.is_half else ids[:, 0] % 2}

    def _clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True)
class Largest(Origin):
    case: str  # title of the model
    provider: str  # the method
    what: str = "largest"  # "largest", or "exact's largest": the batch that is measured
    batch: int = 0  # sequences; 0 if not one fits
    length: int = 0  # tokens of each
    memory: int = 0  # bytes of the device
    # bytes at the peak of a step, parameters and optimizer among them, by ``torch.cuda.max_memory_allocated``; on a CPU
    # those of live tensors
    peak: int | None = None
    seconds: float | None = None  # median of up to three steps
    tokens_per_second: float | None = None  # with this batch
    status: str = "ok"  # "ok", or what ended the search
    seed: int = 0  # of the weights and the tokens


def run_largest(path: Path, device: str, *, tiny: bool, timeout: float, commit: str) -> list[Largest]:
    about: dict[str, Any] = origin(device, commit)
    rows, end = list[Largest](), time.monotonic() + timeout
    waiting = [(case, provider) for case, model in CASES.items() for provider in model.providers]
    exact: dict[str, int] = {}
    while waiting:
        case, provider = waiting[0]
        left = max(1.0, (end - time.monotonic()) / len(waiting))
        del waiting[0]
        row = Largest(case=case, provider=provider, **about)
        try:
            # What a process reports must be there before it is ended.
            found = call(
                search_in, case, provider, device, tiny, time.time() + 0.9 * left, exact.get(case), timeout=left
            )
            rows += [dataclasses.replace(row, **one) for one in found]
        except ProcessError as error:
            rows.append(dataclasses.replace(row, status=str(error).strip().splitlines()[-1]))
        if provider == EXACT:
            exact[case] = rows[-1].batch
        write_rows(path, rows)
        print(f"{case}, {provider}: {rows[-1].batch}, {rows[-1].status}", file=sys.stderr, flush=True)
    return rows


def search_in(case: str, provider: str, device: str, tiny: bool, end: float, exact: int | None) -> list[dict[str, Any]]:
    """Search for the largest batch of one method; meant for a process of its own."""
    begin = time.time()
    trial = Trial(CASES[case], provider, device, tiny)
    batch, status = largest(trial.peak, trial.memory, trial.first, end - (end - begin) / 6)
    chosen = {"exact's largest": exact} if exact and exact < batch else {}
    rows = list[dict[str, Any]]()
    for what, size in {**chosen, "largest": batch}.items():
        row = {"what": what, "batch": size, "length": trial.length, "memory": trial.memory}
        try:
            row |= trial.measured(size, end)
            state = "ok"
        except RuntimeError as error:
            state = f"when it was measured: {first_line(error)}"
        rows.append(row | {"status": status if what == "largest" and status != "ok" else state})
    return rows


def has_failed(row: Largest) -> bool:
    """Say whether a row is a failure: a search that only ran out of time has found something."""
    return row.status != "ok" and not (row.status.startswith(NO_TIME) and row.batch)
