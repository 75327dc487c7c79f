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

from benchmarks.fit_paper_models import MODELS
from benchmarks.largest_search import NO_TIME, first_line, is_full, largest
from benchmarks.models import checkpoint
from benchmarks.processes import ProcessError, call
from benchmarks.records import Origin, origin, write_rows
from rmm_linear import RMMConfig, convert
from rmm_linear._support.tables import table
from rmm_linear.context.auto_bits import STEPS
from rmm_linear.memory.peak import LiveTensors, Peak

EXACT = "exact"
_ON_CPU, _FIRST_TINY = 10_000_000, 4  # bytes of a device that is none, to try the command; sequences of 32 tokens
_CHECKPOINT, _CHUNKS, _DEFAULT = "torch checkpoint", "torch checkpoint, loss in chunks", "default"


@dataclass(frozen=True, kw_only=True)
class Largest(Origin):
    """One method that trains one model.

    Attributes:
        case: Title of the model.
        provider: The method.
        what: "largest", or "exact's largest": the batch that is measured.
        batch: Sequences; 0 if not one fits.
        length: Tokens of each.
        memory: Bytes of the device.
        peak: Bytes at the peak of a step, parameters and optimizer among them, by
            ``torch.cuda.max_memory_allocated``; on a CPU those of live tensors.
        seconds: Median of up to three steps.
        tokens_per_second: With this batch.
        status: "ok", or what ended the search.
        seed: Of the weights and the tokens.
    """

    case: str
    provider: str
    what: str = "largest"
    batch: int = 0
    length: int = 0
    memory: int = 0
    peak: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    status: str = "ok"
    seed: int = 0


@dataclass(frozen=True)
class _Model:
    make: Callable[[bool], nn.Module]
    length: int
    first: int
    providers: tuple[str, ...]
    is_half: bool


def _roberta(tiny: bool) -> nn.Module:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 100}
    small |= {"intermediate_size": 128}
    base: dict[str, Any] = {"vocab_size": 50265, "max_position_embeddings": 514}
    shape: Any = small if tiny else base
    return RobertaForSequenceClassification(RobertaConfig(**shape, attention_probs_dropout_prob=0.0, use_cache=False))


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


def run_largest(path: Path, device: str, *, tiny: bool, timeout: float, commit: str) -> list[Largest]:
    """Find the largest batches.

    Args:
        path: The csv file; it is written after every method.
        device: "cuda"; "cpu" counts live tensors against a few megabytes, to try the command.
        tiny: Toy models.
        timeout: Seconds for all of it; searches end early rather than not at all.
        commit: What to write as the commit; "" asks git.

    Returns:
        The rows.
    """
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
    """Search for the largest batch of one method; meant for a process of its own.

    Args:
        case: Of :data:`CASES`.
        provider: The method.
        device: "cpu" or "cuda".
        tiny: Toy models.
        end: By ``time.time``, when all must be done; the last sixth is for the steps that are measured.
        exact: The batch that is measured besides; None or 0 measures none.

    Returns:
        Fields of a :class:`Largest` for each batch that was measured, the largest last.
    """
    begin = time.time()
    trial = _Trial(CASES[case], provider, device, tiny)
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


class _Trial:
    """A model that trains with one method, and whatever batch."""

    def __init__(self, model: _Model, provider: str, device: str, tiny: bool) -> None:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # what is free fits any size
        torch.manual_seed(0)
        self.device, self.is_half = device, model.is_half
        self.length = 32 if tiny else model.length
        self.memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else _ON_CPU
        with torch.device(device):
            self.model: Any = model.make(tiny).train()
        if provider in (_CHECKPOINT, _CHUNKS):
            checkpoint(self.model, self.model.config.num_hidden_layers)
        if provider in (_CHUNKS, _DEFAULT):
            convert(self.model, RMMConfig(operations=("logits",)) if provider == _CHUNKS else None)
        # The step takes its time and moves nothing.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        self.first = _FIRST_TINY if tiny else model.first
        for _ in range(STEPS + 1):  # until states are there and widths are chosen
            self._step(self.first)

    def peak(self, batch: int) -> int | None:
        """Try two steps, the second of which finds what the first has left.

        Args:
            batch: Sequences.

        Returns:
            Bytes at the peak; None if they are too many.

        Raises:
            RuntimeError: If something else is wrong.
        """
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
        """Measure up to three steps.

        Args:
            batch: Sequences; 0 measures nothing.
            end: By ``time.time``; after the first, no step begins that would not be done by then.

        Returns:
            Fields of a :class:`Largest`.
        """
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


def has_failed(row: Largest) -> bool:
    """Say whether a row is a failure: a search that only ran out of time has found something.

    Args:
        row: Of a method.

    Returns:
        Whether something went wrong.
    """
    return row.status != "ok" and not (row.status.startswith(NO_TIME) and row.batch)


def largest_table(rows: Sequence[Largest]) -> str:
    """Make the table.

    Args:
        rows: Of all models.

    Returns:
        A line per batch that was measured.
    """
    lines = [
        (
            row.case,
            row.provider,
            f"{row.batch} × {row.length}" + (" (exact's)" if row.what != "largest" else ""),
            "" if row.peak is None else f"{row.peak / 1e9:.3g} of {row.memory / 1e9:.3g} GB",
            "" if row.seconds is None else f"{row.seconds:.3g} s",
            "" if row.tokens_per_second is None else f"{row.tokens_per_second:.3g}",
            row.status,
        )
        for row in rows
    ]
    return table(("model", "method", "batch", "peak", "a step", "tokens per second", "status"), lines)
