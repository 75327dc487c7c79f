"""Compare kinds and widths of sketches at the same memory, on a model's own training step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear._support.progress import counting, expect, reporting
from rmm_linear._support.tables import table
from rmm_linear.config import RMMConfig
from rmm_linear.packing import CODES
from rmm_linear.sketches import KINDS
from rmm_linear.variance.closed_forms import correlation, sgd_variance, sketch_variance
from rmm_linear.variance.survey.records import LayerRecord, record_layers

logger = logging.getLogger(__name__)

MEMORIES = (0.05, 0.1, 0.2)
PAPER = "gaussian with padding (the paper)"
AUTO = 'countsketch, bits="auto"'


@dataclass(frozen=True)
class MemoryNoise:
    """The variance ratio of one layer at one memory.

    Attributes:
        layer: Name of the layer.
        setting: Kind of sketch, or a word about how it is used, such as :data:`PAPER`.
        bits: Bits per stored element; 16 or 32 is the input's own dtype.
        memory: Saved bytes as a fraction of the input's bytes; one row at least.
        noise: The variance ratio D²_sketch / D²_SGD, samples being sequences where the layer sees them.
    """

    layer: str
    setting: str
    bits: float
    memory: float
    noise: float


def train_and_record(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    modules: str | Sequence[str] = "all-linear",
    learning_rate: float = 1e-4,
    progress: bool | None = None,
) -> list[LayerRecord]:
    """Train exactly on all batches but the last one, and record the layers on that.

    A fresh head has gradients unlike those of training; a few steps cure that.

    Args:
        model: See :func:`record_layers`. Its weights change if there is more than one batch.
        batches: Training batches.
        modules: Which layers, as ``target_modules`` of :class:`rmm_linear.RMMConfig`.
        learning_rate: Of AdamW.
        progress: Whether to say on stderr how far it is. None: on a terminal, or where the library's logger is at INFO.

    Returns:
        The layers that see tokens on the last batch; heads with one row per sequence stay exact and are left out.

    Raises:
        ValueError: If there is no batch, or no layer sees tokens.
    """
    batches = list(batches)
    if not batches:
        raise ValueError("The variance ratio is measured on a batch, got none. Give at least one.")
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    records: list[LayerRecord] = []
    seen: list[LayerRecord] = []
    with reporting("train_and_record", progress):
        expect(len(batches), what="exact training: ")
        with counting("training", len(batches)) as begins:
            for step, batch in enumerate(batches):
                begins("" if step < len(batches) - 1 else "recording")
                optimizer.zero_grad()
                seen = record_layers(model, batch, modules)
                records = [record for record in seen if record.samples is not None]
                if step == len(batches) - 1:
                    break
                optimizer.step()
    optimizer.zero_grad()
    if not records:
        raise ValueError("Sketches are for layers that see tokens, inputs of three dimensions, and the model has none.")
    sequences = {record.samples[0] for record in records if record.samples is not None}
    unknown = [record.name for record in seen if record.samples is None and len(record.x) not in sequences]
    if unknown:
        logger.warning(
            "%d layers are left out, %s among them: their rows are neither sequences nor known tokens of them. Give "
            "the batch an attention_mask of shape (batch, sequence).",
            len(unknown), unknown[0],
        )  # fmt: skip
    return records


def noise_at_memory(
    records: Sequence[LayerRecord],
    *,
    kinds: Sequence[str] = KINDS,
    widths: Sequence[float | None] = (None, *CODES),
    memories: Sequence[float] = MEMORIES,
    itemsize: int = 2,
    draws: int = 1,
    progress: bool | None = None,
) -> list[MemoryNoise]:
    """Compute the variance ratio D²_sketch / D²_SGD for every layer, kind, width and memory, without padding.

    The memory is what it says on small batches too, where a conversion would save ``min_rows`` rows.

    The published method is added: a dense Gaussian in the input's own dtype, with the padding. So is a CountSketch with
    ``bits="auto"``, see :meth:`rmm_linear.RMMConfig.width`.

    Args:
        records: See :func:`record_layers`.
        kinds: Some of :data:`rmm_linear.sketches.KINDS`.
        widths: Bits per stored element; None is the input's dtype.
        memories: Fractions of the input's bytes.
        itemsize: Bytes per element of the input: 4 for float32, 2 for half types.
        draws: As for :func:`rmm_linear.variance.sketch_variance`.
        progress: As for :func:`train_and_record`.

    Returns:
        One entry for each.
    """
    found: list[MemoryNoise] = []
    with reporting("noise_at_memory", progress), counting("variance ratios of layers", len(records)) as begins:
        for record in records:
            x, y, name = record.x, record.grad_output, record.name
            begins(name)
            sgd = sgd_variance(x, y, samples=record.samples)
            for memory in memories:
                known: dict[tuple[str, float | None], float] = {}
                for kind, bits in product(kinds, widths):
                    known[kind, bits] = float(_sketch_noise(record, kind, bits, memory, itemsize, draws) / sgd)
                    found.append(MemoryNoise(name, kind, bits or 8 * itemsize, memory, known[kind, bits]))
                paper = sketch_variance(x, y, kind="gaussian", rows=max(1, round(memory * x.shape[0]))) / sgd
                found.append(MemoryNoise(name, PAPER, 8 * itemsize, memory, float(paper)))
                tokens, features = x.shape
                valid = tokens if record.mask is None else int(record.mask.count_nonzero())
                bits = RMMConfig(memory=memory).width(features, itemsize, tokens / max(valid, 1))
                auto = known.get(("countsketch", bits))
                if auto is None:
                    auto = float(_sketch_noise(record, "countsketch", bits, memory, itemsize, draws) / sgd)
                found.append(MemoryNoise(name, AUTO, bits or 8 * itemsize, memory, auto))
    return found


def _sketch_noise(
    record: LayerRecord, kind: str, bits: float | None, memory: float, itemsize: int, draws: int
) -> Tensor:
    """D²_sketch of the rows that fit into the memory; zero where the input itself does."""
    x, y = record.x, record.grad_output
    spec = RMMConfig(kind=kind, memory=memory, bits=bits, min_rows=1).spec(x.shape[0], x.shape[1], itemsize)
    if spec is None:
        return torch.zeros((), dtype=torch.float64, device=x.device)
    return sketch_variance(x, y, kind=kind, rows=spec.rows, bits=bits, mask=record.mask, draws=draws)


def medians(noises: Sequence[MemoryNoise]) -> dict[str, dict[float, float]]:
    """Return the median variance ratio over layers, by setting (with its bits) and memory."""
    values: dict[str, dict[float, list[float]]] = {}
    for entry in noises:
        title = entry.setting if entry.setting == AUTO else f"{entry.setting}, {entry.bits} bits"
        values.setdefault(title, {}).setdefault(entry.memory, []).append(entry.noise)
    return {title: {memory: median(layers) for memory, layers in row.items()} for title, row in values.items()}


def describe_batch(records: Sequence[LayerRecord]) -> str:
    """Say how many tokens the recorded batch has, and how many of them are padding."""
    batch, length = records[0].samples or (len(records[0].x), 1)
    mask = records[0].mask
    padding = 0.0 if mask is None else 100 * (1 - float(mask.double().mean()))
    return f"{batch} x {length} tokens, {padding:.0f} % padding"


def describe(records: Sequence[LayerRecord], noises: Sequence[MemoryNoise], itemsize: int) -> str:
    """Lay out the results: a line about the batch, and the table of medians.

    Args:
        records: See :func:`record_layers`.
        noises: See :func:`noise_at_memory`.
        itemsize: Bytes per element of the input.

    Returns:
        The text, without a final line break.
    """
    alpha = median(float(correlation(record.x, record.grad_output)) for record in records)
    head = (
        f"{describe_batch(records)}, {len(records)} layers, {8 * itemsize}-bit input, "
        f"median alpha {alpha:.2g}; median over layers of the variance ratio D2_sketch / D2_SGD"
    )
    found = medians(noises)
    memories = list(next(iter(found.values())))
    header = ("saved", *(f"{100 * memory:g} %" for memory in memories))
    return f"{head}\n{table(header, [(title, *(f'{row[m]:.3f}' for m in memories)) for title, row in found.items()])}"
