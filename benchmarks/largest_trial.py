"""The models of section ``largest`` of ``python -m benchmarks gpu``, and a model that trains with whatever batch."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.fit_paper_models import MODELS
from benchmarks.largest_search import is_full
from benchmarks.models import checkpoint
from rmm_linear import RMMConfig, convert
from rmm_linear.context.auto_bits import STEPS
from rmm_linear.memory.peak import LiveTensors, Peak

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


class Trial:
    """A model that trains with one method, and whatever batch."""

    def __init__(self, model: _Model, provider: str, device: str, tiny: bool) -> None:
        """Make a model and train it until its optimizer has its states.

        Args:
            model: Which.
            provider: The method.
            device: "cpu" or "cuda".
            tiny: A toy model.
        """
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
