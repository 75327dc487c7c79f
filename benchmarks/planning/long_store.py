"""Steps whose blocks save next to nothing: recomputed, compressed, in tiles, and what is left waits in files.

All methods share one model's parameters and one run. The loss is computed in chunks, but for the first rows, so that
gradients can be compared to the bit.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import library
from benchmarks.planning import fit_steps
from benchmarks.planning.networks import transformer
from benchmarks.records import Origin
from benchmarks.suites.models import twin

CHECKPOINT, CHUNKED, LEAST = "torch.utils.checkpoint", "exact, loss in chunks", "fit: least"
LEAST_EXACT = f"{LEAST}, gradients exact"
_CODES, _LOSS = "tenth", "others"  # settings: of converted blocks; of a head, whose loss it computes in chunks
CHOICES = (
    "recompute", "attention", "offload", "recompute + offload", "attention + offload", "selective + offload",
    "recompute + offload + tile", "attention + offload + tile", "convert", "convert + offload", "recompute + convert",
    "recompute + convert + offload",
)  # fmt: skip
_SLICES, _LEAST_ROWS = 16, 64


@dataclass(frozen=True, kw_only=True)
class Stored(Origin):
    """One model with one method: bytes of tensors that a step makes, and its time."""

    model: str  # title, with the batch
    method: str  # "exact", PyTorch's own, the choice of all blocks, or fit's
    between: int = 0  # bytes alive between the passes, the loss alone held
    share: float = 0.0  # of those of the exact step
    peak: int = 0  # of a real step, gradients among it
    # the same by the planner: simulated for the first two rows; converted models are followed in a real step
    predicted: int = 0
    files: int = 0  # bytes in files between the passes
    seconds: float | None = None  # median of a step
    time: float | None = None  # by that of the exact step in the same run
    # largest relative error of a parameter's gradient, by the exact one with the same loss; where codes wait in files,
    # by the one of the same codes
    error: float | None = None
    plan: str = ""  # how many blocks have each option
    seed: int = fit_steps.SEED  # of the weights and the batch


def small(tiny: bool) -> tuple[str, fit_steps.Made]:
    """Make a LLaMA whose head is small beside its layers."""
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        return "LLaMA 2 × 64, 2 × 192", transformer("llama", 2, 192, vocab_size=100, **sizes)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 8}
    return "LLaMA 8 × 256, 2 × 512", transformer("llama", 2, 512, vocab_size=512, **sizes)


def stored(made: tuple[str, fit_steps.Made], about: Mapping[str, Any], *, tiny: bool = False) -> list[Stored]:
    """Measure a model with every method."""
    title, (model, batch) = made
    rows, runs, gradients = dict[str, Stored](), dict[str, fit_steps.Run](), dict[str, list[Tensor]]()
    with tempfile.TemporaryDirectory() as folder:
        for method, planned, plan in _methods(model, batch, Path(folder)):
            row = Stored(model=title, method=method, plan=plan, **about)
            between, files = _between(planned, batch, Path(folder))
            run = runs[method] = fit_steps.step_of(planned, batch)
            row = dataclasses.replace(row, between=between, files=files, peak=fit_steps.live_peak(planned, run))
            rows[method] = dataclasses.replace(row, predicted=library.watch(planned, batch)[0].bytes)
            gradients[method] = gradients_of(planned, run)
        seconds = fit_steps.medians(model, runs, 1 if tiny else fit_steps.ROUNDS)
    exact = rows[fit_steps.EXACT].between
    for method, row in rows.items():
        other = gradients.get(_compared_with(method)) if CHUNKED in gradients else None
        error = None if other is None or method == fit_steps.EXACT else errors(gradients[method], other)
        rows[method] = dataclasses.replace(row, share=row.between / exact, error=error)
    return fit_steps.with_times(rows, seconds)


def _compared_with(method: str) -> str:
    codes = method.replace(f" + {library.OFFLOAD}", "")
    if library.CONVERT in method and codes != method:
        return codes
    return fit_steps.EXACT if method == CHECKPOINT else CHUNKED


def errors(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative error."""
    pairs = zip(found, expected, strict=True)
    return max(float((one - other).norm() / other.norm()) if other.any() else 0.0 for one, other in pairs)


def gradients_of(model: nn.Module, run: fit_steps.Run) -> list[Tensor]:
    fit_steps.clear(model)
    torch.manual_seed(fit_steps.SEED)
    run()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    fit_steps.clear(model)
    return found


def _between(model: nn.Module, batch: dict[str, Tensor], folder: Path) -> tuple[int, int]:
    """Return the bytes that are alive, and those in files, when the forward pass is over."""
    fit_steps.clear(model)
    with library.LiveTensors(library.Peak()) as live:
        loss = model(**batch).loss
        found = live.now, sum(one.stat().st_size for one in folder.rglob("offload-*"))
    loss.backward()
    fit_steps.clear(model)
    return found


Method = tuple[str, nn.Module, str]


def _methods(model: nn.Module, batch: Any, folder: Path) -> Iterator[Method]:
    yield fit_steps.EXACT, model, ""
    checkpointed: Any = twin(model)
    with library.quiet():
        checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    yield CHECKPOINT, checkpointed, ""
    for choice in (library.KEEP, *CHOICES):
        plan = plan_of(model, choice, batch["input_ids"].numel(), str(folder))
        method = CHUNKED if choice == library.KEEP else choice
        yield method, plan.apply(twin(model)), fit_steps.counts(plan.blocks)
    yield from _fitted(model, batch, str(folder))


def _fitted(model: nn.Module, batch: Any, folder: str) -> Iterator[Method]:
    """Yield the plan of least memory, and that of those whose gradients are exact."""
    work = fit_steps.options_of(model, batch, folder)
    for method in (LEAST, LEAST_EXACT):
        with library.quiet():
            report = work.least()
        report.plan.revert()
        yield method, report.plan.apply(twin(model)), fit_steps.counts(report.plan.blocks)
        exact = work.candidates.conversions.is_exact
        settings = {one.name: one for one in library.SETTINGS}
        left = [
            [row for row in rows if library.CONVERT not in row.words or exact(row.name, settings[row.setting])]
            for rows in work.proposals.rows
        ]
        work.proposals = work.candidates.proposals = dataclasses.replace(work.proposals, rows=left)


def plan_of(model: nn.Module, choice: str, tokens: int, folder: str) -> library.BlockPlan:
    """Make the plan with one choice for all layers and the last norm; the loss is computed in chunks."""
    names = library.find_blocks(model)
    conversions = library.Conversions(model, names)
    rows = list[library.PlannedBlock]()
    for name in names:
        operations = set(conversions.operations[name].values())
        if "logits" in operations:
            rows.append(library.PlannedBlock(name, library.CONVERT, setting=_LOSS))
        elif "norm" in operations:  # the layers, and the norm behind them
            setting = _CODES if library.CONVERT in choice else ""
            slices = max(_LEAST_ROWS, tokens // _SLICES) if library.TILE in choice else 0
            rows.append(library.PlannedBlock(name, choice, setting=setting, rows=slices))
        else:
            rows.append(library.PlannedBlock(name, library.KEEP))
    return library.BlockPlan(rows, config=conversions.configure(rows), folder=folder)
