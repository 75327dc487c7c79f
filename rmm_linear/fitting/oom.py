"""Explain why a training step runs out of memory: what is alive at its peak, and the cheapest ways out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rmm_linear._support.progress import reporting, stage
from rmm_linear._support.quiet import quiet
from rmm_linear._support.reports import Report
from rmm_linear._support.sizes import show_both, show_bytes
from rmm_linear._support.tables import keyed, table, wrapped
from rmm_linear.fitting.described import described, described_batch
from rmm_linear.fitting.fit import check_whole
from rmm_linear.fitting.static_memory import static_memory
from rmm_linear.fitting.step_memory import StepMemory, step_memory
from rmm_linear.fitting.ways import OF_PARTS, Way, WaySearch
from rmm_linear.memory.inputs import check_example, restored
from rmm_linear.planning.budget import LEAST, check_model, read_budget
from rmm_linear.planning.step.resize import sequences_of
from rmm_linear.planning.step.step import has_memory, needs_values
from rmm_linear.planning.step.twin import without_weights

_SHOWN = 3  # ways
_APART = 0.01  # of a peak: the copy without weights takes another one
_FUNCTION = "A function as the batch hides what it runs on, so no ways out were tried. Pass the batch itself."
_FITS = (
    "By simulation the step fits. What it does not see: tensors that your loop keeps, such as losses that are added up "
    "with their graphs; what other processes have; and what the allocator holds in fragments "
    "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)."
)


@dataclass(frozen=True, repr=False)
class OutOfMemoryReport(Report):
    """The result of :func:`rmm_linear.planning.explain_oom`.

    Attributes:
        model: Its class.
        weights: A sentence about its parameters, and what saves memory already.
        batch: A few words about the batch.
        now: Memory of a step as it is, and the tensors that live at its peak.
        memory: The memory that there is, in bytes; None where it is not known.
        ways: Ways out: those that fit first, by their time.
        notes: What was left out, with the reason, and what simulations do not see.
    """

    model: str
    weights: str
    batch: str
    now: StepMemory
    memory: int | None = None
    ways: Sequence[Way] = ()
    notes: Sequence[str] = ()

    @property
    def fits(self) -> bool | None:
        """Whether the step fits by simulation, as it is; None where the memory is not known."""
        return None if self.memory is None else self.now.peak <= self.memory

    def summary(self) -> str:
        """Return the peak, the memory and what is missing, in one line."""
        parts = [f"peak={show_bytes(self.now.peak)}", f"in the {self.now.moment}"]
        if self.memory is not None:
            over = self.now.peak - self.memory
            parts += [f"memory={show_both(self.memory)}", f"over={show_bytes(over)}" if over > 0 else "fits"]
        return keyed("rmm_linear explain_oom:", parts)

    def _text(self, *, is_whole: bool) -> str:
        ways = self.ways if is_whole else self.ways[:_SHOWN]
        parts = [
            self.summary(),
            f"{wrapped(f'{self.model}: {self.weights}')}\n{wrapped(self.batch)}",
            self.now.tables(is_whole=is_whole),
            self._ways(ways),
            "\n".join(wrapped(f"Note: {note}", 2) for note in self.notes),
        ]
        return "\n\n".join(filter(None, parts))

    def _ways(self, ways: Sequence[Way]) -> str:
        if not ways:
            return ""
        is_known = self.memory is not None
        head = "Ways out" if not is_known or ways[0].fits else "No way out fits. The lowest peaks"
        rows = [
            (
                str(place),
                way.name,
                show_bytes(way.peak),
                "" if way.fits is None else "yes" if way.fits else "no",
                f"{way.time:.2f}",
                _noise(way),
            )
            for place, way in enumerate(ways, 1)
        ]
        columns = ("", head, "peak", "fits", "time", "gradients")
        left = len(self.ways) - len(ways)
        said = ["Time is that of a step relative to the step as it is, estimated."]
        said += [f"There are {left} more, see table()."] if left > 0 else []
        lines = [wrapped(" ".join(said), 2), "", "What to type:"]
        for place, way in enumerate(ways, 1):
            lines += [f"{place}. {line}" if not row else f"   {line}" for row, line in enumerate(way.code.split("\n"))]
            lines += [wrapped(f"   {way.note}", 3)] if way.note else []
        return "\n".join([table(columns, rows), *lines])

    def _records(self) -> list[dict[str, Any]]:
        return [asdict(way) for way in self.ways]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON types.

        Returns:
            model, weights, batch, memory, fits and notes; now: as ``StepMemory.to_dict`` has it; ways: name, code, peak
            in bytes, time, noise, fits and note of each.
        """
        names = ("model", "weights", "batch", "memory", "fits")
        found = {name: getattr(self, name) for name in names}
        return {**found, "now": self.now.to_dict(), "ways": self._records(), "notes": [*self.notes]}


def _noise(way: Way) -> str:
    if way.noise is None:
        return "others" if way.note.startswith(OF_PARTS) else "random, not measured"
    return f"random, variance ratio {way.noise:.2g}" if way.noise else "exact"


def _without_values(tensor: Tensor) -> Tensor:
    """Return a tensor of a batch that takes no memory of the device; masks have their values, which models look at."""
    if tensor.is_meta or not tensor.is_floating_point():
        return tensor.detach().cpu() if not tensor.is_meta else tensor
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)


def explain_oom(
    model: nn.Module,
    batch: Any,
    memory: int | float | str | None = None,
    *,
    optimizer: Any = None,
    progress: bool | None = None,
) -> OutOfMemoryReport:
    """Explain why a training step runs out of memory: what is alive at its peak, and the three cheapest ways out.

    To be called after an error, or before. Nothing is trained, and nothing is allocated on the model's device: a step
    is simulated on tensors without memory, and ways out are tried on a copy of the model without weights. The model,
    its gradients, hooks and modes, the optimizer and random numbers stay as they are. It takes some twenty simulated
    steps, most of them for :func:`rmm_linear.fit`, which is one of the ways.

    Tried are fused attention, a loss in chunks, activation checkpointing, compressed activations, parts of the batch
    with added gradients, one plan by :func:`rmm_linear.fit`, and what lowers the optimizer's bytes. A model may be
    converted, planned, under checkpointing, with adapters or quantized already; what is on is said, and not offered
    again. On the copy, as for :func:`rmm_linear.planning.simulate` on the meta device, padding counts: peaks are upper
    bounds.

    Args:
        model: The model, as it trains.
        batch: The training batch, as for :func:`rmm_linear.fit`. Of a function, the peak is explained alone.
        memory: What there is: bytes, a text such as "8GB", or a share of the simulated peak in (0, 1]. None: all of the
            model's CUDA device; for other models, it is said what each way reaches.
        optimizer: As for :func:`rmm_linear.fit`.
        progress: As for :func:`rmm_linear.fit`.

    Returns:
        The report. Print it.

    Raises:
        TypeError: If the model is none, or the batch is none that it takes.
        ValueError: If the batch has no rows or lies on another device, the memory is no size, the model is sharded, or
            a step of it cannot be simulated.

    Example:
        >>> blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        >>> found = explain_oom(nn.Sequential(*blocks), torch.randn(1024, 64), "4MB")
        >>> found.fits, found.ways[0].fits
        (False, True)
    """
    model = getattr(model, "_orig_mod", model)  # of a compiled one, whose step is simulated uncompiled
    check_model(model)
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    check_whole(inner, "explain_oom")
    check_example(inner, batch)
    if memory == LEAST:
        raise ValueError('memory must be what there is, got "least". Leave it out to see what each way reaches.')
    if memory is not None:
        read_budget(memory, 1)
    if not callable(batch):
        sequences_of(batch)
    elif needs_values(inner) and has_memory(inner):
        raise ValueError(
            "The step of a converted model is simulated on a copy, for which the batch may be no function. Pass the "
            "batch itself: a mapping, a sequence of tensors, or a tensor."
        )
    with reporting("explain_oom", progress), quiet(), restored(nn.Module()):
        return _explained(model, inner, batch, memory, optimizer)


def _explained(
    model: nn.Module, inner: nn.Module, batch: Any, memory: int | float | str | None, optimizer: Any
) -> OutOfMemoryReport:
    notes, static = list[str](), static_memory(model, optimizer)
    device = next((p.device for p in inner.parameters() if p.device.type not in ("cpu", "meta")), None)
    if memory is None and device is not None and device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    is_on_cpu = device is None and has_memory(inner)
    trial: WaySearch | None = None
    try:
        stage("simulating a step")
        # Without weights, or converted, the model's copy tells as much.
        has_own = callable(batch) or (has_memory(inner) and not needs_values(inner))
        now = step_memory(inner, batch, static) if has_own else None
        if not callable(batch):
            here = tree_map_only(Tensor, _without_values, batch)
            trial = WaySearch(without_weights(inner), here, static, None, optimizer, is_on_cpu)
            now = now or trial.now
    except (ValueError, TypeError):
        raise
    except Exception as error:  # of the model's own code
        got = f"{type(error).__name__}: {error}".strip().rstrip(".")
        raise ValueError(
            f"A step of {type(inner).__name__} on this batch cannot be simulated: {got}. Simulated tensors have shapes "
            "and no values; check that the model runs on a small batch, and see planning.simulate."
        ) from error
    assert now is not None  # noqa: S101 a function runs on models that need no values
    limit = None if memory is None else read_budget(memory, now.peak)
    ways = list[Way]()
    if trial is None:
        notes.append(_FUNCTION)
    else:
        trial.memory = limit
        if abs(trial.now.peak - now.peak) > _APART * now.peak:
            notes.append(
                f"Ways are tried on a copy without weights, whose step takes {show_bytes(trial.now.peak)} as it is."
            )
        ways = trial.found()
        notes += trial.notes
    if limit is not None and now.peak <= limit:
        notes.insert(0, _FITS)
    words, of_batch = described(inner), described_batch(batch, optimizer)
    return OutOfMemoryReport(type(inner).__name__, words, of_batch, now, limit, ways, notes)
