"""One sequence of 4,096 tokens through a few of LLaMA's layers: what a step keeps, its peak, its time and its error.

The layers and the last norm have one choice, or fit's; the loss is computed in chunks, but for the first two rows.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import library
from benchmarks.planning import fit_steps
from benchmarks.planning.long_store import CHECKPOINT, Method, Stored, plan_of
from benchmarks.planning.networks import transformer
from benchmarks.suites.models import twin

CHOICES = (
    "recompute + offload", "recompute + offload + tile", "convert", "convert + tile", "convert + offload",
    "convert + offload + tile",
)  # fmt: skip
SHARES = (0.3, 0.15)  # of the exact peak: budgets of fit
_ROUNDS, _LEARNED, _SHORT = 2, 3, 128  # rounds; steps in which a converted model learns, and their tokens


@dataclass(frozen=True, kw_only=True)
class LongStep(Stored):
    """One model of one dtype with one method; ``error`` is of the whole gradient, by the exact one."""

    dtype: str


def sequences(about: Mapping[str, Any], *, tiny: bool = False) -> Iterator[list[LongStep]]:
    for dtype in (torch.float32, torch.bfloat16):
        yield _measured(dtype, about, tiny)


def _measured(dtype: torch.dtype, about: Mapping[str, Any], tiny: bool) -> list[LongStep]:
    width, length = (64, 256) if tiny else (512, 4096)
    sizes = {"hidden_size": width, "intermediate_size": width // 4 * 11, "num_hidden_layers": 4}
    heads = {"num_attention_heads": width // 64, "max_position_embeddings": length}
    model, batch = transformer("llama", 1, length, vocab_size=512, **sizes, **heads)
    model, short = model.to(dtype), {key: value[:, :_SHORT] for key, value in batch.items()}
    here = {"model": f"LLaMA 4 × {width}, 1 × {length:,}", "dtype": str(dtype).removeprefix("torch."), **about}
    rows, runs, exact = dict[str, LongStep](), dict[str, fit_steps.Run](), list[Tensor]()
    with tempfile.TemporaryDirectory() as folder:
        for method, planned, plan in _methods(model, batch, folder):
            for _ in range(_LEARNED):
                planned(**short).loss.backward()
            fit_steps.clear(planned)
            peak = library.Peak()
            with library.LiveTensors(peak) as live:
                loss = planned(**batch).loss
                between, files = live.now, sum(one.stat().st_size for one in Path(folder).rglob("offload-*"))
                loss.backward()
            found = [one.grad.float() for one in planned.parameters() if one.grad is not None]
            exact = exact or found
            fit_steps.clear(planned)
            sizes = {"between": between, "files": files, "peak": peak.bytes}
            rows[method] = LongStep(method=method, plan=plan, error=_apart(found, exact), **sizes, **here)
            runs[method] = fit_steps.step_of(planned, batch)
        seconds = _seconds(model, runs, 1 if tiny else _ROUNDS)
    whole = rows[fit_steps.EXACT].between
    rows = {method: replace(row, share=row.between / whole) for method, row in rows.items()}
    return fit_steps.with_times(rows, seconds)


def _seconds(model: nn.Module, runs: Mapping[str, fit_steps.Run], rounds: int) -> dict[str, float]:
    """Time steps in turns: the least processor time of each, which other programs disturb less than the clock's."""
    found: dict[str, list[float]] = {method: [] for method in runs}
    for _ in range(rounds):
        for method, run in runs.items():
            begin = time.process_time()
            run()
            found[method].append(time.process_time() - begin)
            fit_steps.clear(model)
    return {method: min(seconds) for method, seconds in found.items()}


def _apart(found: list[Tensor], exact: list[Tensor]) -> float:
    """Return ‖ĝ − g‖ / ‖g‖ of the whole gradient."""
    apart = sum(float((one - other).square().sum()) for one, other in zip(found, exact, strict=True))
    return (apart / sum(float(one.square().sum()) for one in exact)) ** 0.5


def _methods(model: nn.Module, batch: dict[str, Tensor], folder: str) -> Iterator[Method]:
    yield fit_steps.EXACT, model, ""
    checkpointed: Any = twin(model)
    with library.quiet():
        checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    yield CHECKPOINT, checkpointed, ""
    for choice in CHOICES:
        plan = plan_of(model, choice, batch["input_ids"].numel(), folder)
        yield choice, plan.apply(twin(model)), fit_steps.counts(plan.blocks)
    work = fit_steps.options_of(model, batch, folder)
    for share in SHARES:
        report = fit_steps.fitted(
            work, work.static.before_step + int(share * (work.exact_peak - work.static.before_step))
        )
        if isinstance(report, str):
            continue
        yield f"fit: {share:.0%} of the peak", report.plan.apply(twin(model)), fit_steps.counts(report.plan.blocks)
