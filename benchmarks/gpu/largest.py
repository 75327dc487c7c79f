"""Section ``largest`` of ``python -m benchmarks gpu``: the largest batch that a device holds, found by trying.

Whole models train in bfloat16 with AdamW: RoBERTa-base under autocast, and LLaMAs that are bfloat16 themselves.
Attention has no dropout, as in current models: it is where the fast kernels of PyTorch and ours are. Every method runs
in a process of its own. The bytes of two small batches say where the largest should lie; it is tried, and what is
around it. Each is also measured with the batch that is exact training's largest. Of one sequence, its longest length is
found likewise; and torchtune's and PEFT's published settings of Llama-3.2-3B have one batch, which is measured.
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
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.library import LiveTensors, Peak
from benchmarks.planning.fit_paper import MODELS
from benchmarks.processes import ProcessError, call
from benchmarks.records import Origin, origin, write_rows
from benchmarks.suites.models import build, checkpoint
from rmm_linear import convert

NO_TIME, FULL = "no more time", "does not fit"
_PRECISION, _MOST = 16, 64  # the least batch that does not fit is at most a 16th larger; a guess at most 64 times


def largest(peak: Callable[[int], int | None], memory: int, first: int, end: float, power: int = 1) -> tuple[int, str]:
    """Find the largest size that fits, and say whether that is known; time grows with that power of the size."""
    known, high, failures, size, pace = [(0, 0)], None, 0, first, 0.0
    while high is None or high - known[-1][0] > max(1, known[-1][0] // _PRECISION):
        begin, low = time.time(), known[-1][0]
        if begin + pace * size**power > end:
            return low, f"{NO_TIME}: at least {low}" + ("" if high is None else f", less than {high}")
        try:
            found = peak(size)
        except RuntimeError as error:
            return low, f"with {size}: {first_line(error)}"
        pace = (time.time() - begin) / size**power
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
_GRAIN = 256  # tokens: the longest sequence is a multiple
_CHECKPOINT, _CHUNKS, _RECOMPUTED, _DEFAULT, _CAREFUL = (
    "torch checkpoint", "loss in chunks", "torch checkpoint, loss in chunks", "default", "careful",
)  # fmt: skip


@dataclass(frozen=True)
class _Model:
    make: Callable[[bool], nn.Module]
    first: int  # what is tried first: sequences, or for the longest one 256 tokens
    providers: tuple[str, ...]
    length: int | None = None  # tokens of a sequence; None: the longest one is found
    is_half: bool = True
    is_found: bool = True  # whether the largest is found; otherwise the first is measured and no other


def _roberta(tiny: bool) -> nn.Module:
    small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 100}
    small |= {"intermediate_size": 128}
    shape = small if tiny else {"vocab_size": 50265, "max_position_embeddings": 514}
    return build("Roberta", "ForSequenceClassification", **shape, attention_probs_dropout_prob=0.0, use_cache=False)


def _llama(name: str, tiny: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**MODELS["tiny" if tiny else name], use_cache=False, tie_word_embeddings=name == "3b")  # pyright: ignore[reportArgumentType]
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _adapted(tiny: bool, **fields: Any) -> nn.Module:
    """Add LoRA of rank 32, on the layers of PEFT's default, as its suite has it."""
    import peft

    return peft.get_peft_model(_llama("3b", tiny), peft.LoraConfig(r=32, task_type="CAUSAL_LM", **fields))  # pyright: ignore[reportArgumentType]


def _with_velora(tiny: bool) -> nn.Module:
    import peft

    return _adapted(tiny, velora_config=peft.VeloraConfig())


_ADAPTED = _adapted, _with_velora  # where PEFT is installed
_ALL = EXACT, _DEFAULT, _CHECKPOINT, _RECOMPUTED
_OF_CHUNKS = _CHUNKS, _RECOMPUTED, _DEFAULT, _CAREFUL
CASES: dict[str, _Model] = {
    "roberta-base": _Model(_roberta, 8, (EXACT, _DEFAULT, _CHECKPOINT), 512, is_half=False),
    "llama, 1.1 billion": _Model(partial(_llama, "1.1b"), 1, _ALL, 2048),
    "llama, 1.1 billion, one sequence": _Model(partial(_llama, "1.1b"), 8, _OF_CHUNKS[:3]),
    "llama, 3.2 billion": _Model(partial(_llama, "3b"), 2, _OF_CHUNKS, 4096, is_found=False),
    "llama, 3.2 billion, LoRA": _Model(_adapted, 4, (EXACT, _CHECKPOINT, _DEFAULT, _CAREFUL), 768, is_found=False),
    "llama, 3.2 billion, VeLoRA": _Model(_with_velora, 4, (EXACT,), 768, is_found=False),
}


class Trial:
    def __init__(self, model: _Model, provider: str, device: str, tiny: bool) -> None:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # what is free fits any size
        torch.manual_seed(0)
        self.device, self.is_half = device, model.is_half
        self.length = None if model.length is None else 32 if tiny else model.length
        self.memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else _ON_CPU
        with torch.device(device):
            self.model: Any = model.make(tiny).train()
        if provider in (_CHECKPOINT, _RECOMPUTED):
            checkpoint(self.model)
        if provider in (_CHUNKS, _RECOMPUTED):
            convert(self.model, operations=("logits",))
        elif provider in (_DEFAULT, _CAREFUL):
            convert(self.model, quality=provider)
        # The step takes its time and moves nothing.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        self.first = _FIRST_TINY if tiny and model.is_found else model.first
        for _ in range(2 if model.is_found else 7):  # until states are there, and modules have learned what they learn
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
        count, length = self.shape(batch)
        return {"peak": peak, "seconds": median, "tokens_per_second": count * length / median}

    def shape(self, size: int) -> tuple[int, int]:
        """Return sequences and tokens of each."""
        return (min(size, 1), _GRAIN * size) if self.length is None else (size, self.length)

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
        words = self.model.config.vocab_size
        ids = torch.randint(3, words, self.shape(batch), generator=generator).to(self.device)
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
    what: str = "largest"  # "largest", "exact's largest" or "published": the batch that is measured
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
    left_out = [case for case, model in CASES.items() if model.make in _ADAPTED and find_spec("peft") is None]
    if left_out:
        print(f"left out, for want of PEFT: {'; '.join(left_out)}", file=sys.stderr, flush=True)
    waiting = [(case, name) for case, model in CASES.items() if case not in left_out for name in model.providers]
    exact: dict[str, int] = {}
    while waiting:
        case, provider = waiting[0]
        left = max(1.0, (end - time.monotonic()) / len(waiting))
        del waiting[0]
        row = Largest(case=case, provider=provider, what=_what(case), **about)
        try:
            # What a process reports must be there before it is ended.
            found = call(
                search_in, case, provider, device, tiny, time.time() + 0.9 * left, exact.get(case), timeout=left
            )
            rows += [dataclasses.replace(row, **one) for one in found]
        except ProcessError as error:
            rows.append(dataclasses.replace(row, status=str(error).strip().splitlines()[-1]))
        if provider == EXACT and CASES[case].is_found:
            exact[case] = rows[-1].batch
        write_rows(path, rows)
        found = f"{rows[-1].batch} × {rows[-1].length}, {rows[-1].status}"
        print(f"{case}, {provider}: {found}", file=sys.stderr, flush=True)
    return rows


def _what(case: str) -> str:
    return "largest" if CASES[case].is_found else "published"


def search_in(case: str, provider: str, device: str, tiny: bool, end: float, exact: int | None) -> list[dict[str, Any]]:
    """Search for the largest batch of one method; meant for a process of its own."""
    begin = time.time()
    try:
        trial = Trial(CASES[case], provider, device, tiny)
    except RuntimeError as error:
        if not is_full(error):
            raise
        return [{"status": FULL}]
    if CASES[case].is_found:
        is_long = trial.length is None
        batch, status = largest(trial.peak, trial.memory, trial.first, end - (end - begin) / 6, 2 if is_long else 1)
        status += f", times {_GRAIN} tokens" * (is_long and status != "ok")
    else:
        batch, status = trial.first, "ok"
    chosen = {"exact's largest": exact} if exact and exact < batch else {}
    rows = list[dict[str, Any]]()
    for what, size in {**chosen, _what(case): batch}.items():
        count, length = trial.shape(size)
        row = {"what": what, "batch": count, "length": length, "memory": trial.memory}
        try:
            row |= trial.measured(size, end)
            state = "ok"
        except RuntimeError as error:
            is_published = what == "published" and is_full(error)
            state = FULL if is_published else f"when it was measured: {first_line(error)}"
        rows.append(row | {"status": status if what != "exact's largest" and status != "ok" else state})
    return rows


def has_failed(row: Largest) -> bool:
    """Say whether a row is a failure: a search that only ran out of time has found something."""
    return row.status not in ("ok", FULL) and not (row.status.startswith(NO_TIME) and row.batch)
