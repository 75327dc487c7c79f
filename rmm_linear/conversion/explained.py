"""Explain what a conversion saves: run the model exact, with its linear layers alone converted, and converted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rmm_linear._support.sizes import show_bytes
from rmm_linear.config import OPERATIONS
from rmm_linear.context.checkpointing import how_to_turn_off
from rmm_linear.context.model_context import ModelContext
from rmm_linear.conversion.checkpointed import block_memory, checkpointed_blocks, inside, noting_recomputed
from rmm_linear.conversion.exact import exact_but, set_aside
from rmm_linear.conversion.explanation import Explanation, LayerMemory
from rmm_linear.conversion.names import first_names
from rmm_linear.conversion.remaining import RECOMPUTED_INPUTS, Reasons, book_regions, by_operation, still_saved
from rmm_linear.conversion.report import RECOMPUTED, ConversionReport
from rmm_linear.memory.inputs import (
    LayerInput,
    call_with,
    layer_inputs,
    restored,
    saved_tensors,
    unsaved_reason,
)
from rmm_linear.memory.ledger import StorageKey

_LOWERS_PEAK = "recomputed under activation checkpointing, where its sketch lowers the peak inside of the block"


def explained(model: nn.Module, report: ConversionReport, batch: Any) -> Explanation:
    """Explain what a converted model saves on a training batch, by forward passes that leave no trace in it."""
    names = list(report.converted)
    with set_aside(model):
        with exact_but(model), noting_recomputed(model) as noted:
            inputs, before, savers_before = layer_inputs(model, batch, names)
            recomputed = inside(noted.names, [*names, *report.packed])
            report = replace(report, checkpointed=tuple(dict.fromkeys((*report.checkpointed, *recomputed))))
            exact = {name: _why_exact(report, name, seen) for name, seen in inputs.items()}
            few = {name: reason for name, reason in exact.items() if reason is not None}
            why = Reasons(model, batch, report, first_names(model), few)
        with exact_but(model, [operation for operation in OPERATIONS if operation != "linear"]):
            found = layer_inputs(model, batch, names)[0]
            reasons = {n: _LOWERS_PEAK if n in report.checkpointed else unsaved_reason(i) for n, i in found.items()}
        with noting_recomputed(model) as noted:
            after, savers = saved_tensors(model, batch)
        book_regions(report, (after, savers))
        why.note_recomputed(noted.inputs)
        why.note_attention(model)
        block = block_memory(model, batch) if report.checkpointed else None
    layers: dict[str, LayerMemory] = {}
    # Of layers with the same input, the first one that is trained saves it: with LoRA, not the frozen one.
    owners: dict[StorageKey | None, str] = {}
    for name in sorted(inputs, key=lambda name: report.converted[name].frozen):
        owners.setdefault(inputs[name].storage, name)
    owners.pop(None, None)
    for name in names:
        seen = inputs.get(name)
        if seen is None:
            layers[name] = LayerMemory(0, 0, "the batch does not reach this layer")
            continue
        owner = owners.get(seen.storage, name)
        own = seen.bytes if seen.storage is not None and not seen.others and owner == name else 0
        shared = None if owner == name else f"the same input as {_seen_from(owner, name)}"
        layers[name] = LayerMemory(own, after.by_module.get(name, 0), few.get(name) or reasons.get(name) or shared)
    compressed, remaining, kinds, hints = still_saved(after.storages, savers, why, before.total)
    sums = by_operation(report, (before, savers_before), (after, savers))
    if block is not None and block.packed < block.before:
        saved, count = kinds.get(RECOMPUTED_INPUTS, 0), len(checkpointed_blocks(model))
        hints.insert(
            0,
            f"checkpointing is on: {count} blocks are recomputed, and the modules inside stay exact. Off, the blocks "
            f"would save about {show_bytes(count * block.packed)} compressed, instead of their inputs of "
            f"{show_bytes(saved)}, and nothing is computed twice: {how_to_turn_off(model)}",
        )
    return Explanation(
        layers, before.total, after.total, sums, remaining, compressed, block, report.unfused, kinds, tuple(hints[:2])
    )


def _seen_from(owner: str, name: str) -> str:
    """Return a layer's name without what it begins with in common with another's."""
    parts, others = owner.split("."), name.split(".")
    common = next((i for i, (one, other) in enumerate(zip(parts, others, strict=False)) if one != other), 0)
    return ".".join(parts[common:])


def keep_exact_on(model: nn.Module, context: ModelContext, batch: Any) -> None:
    """Make the modules exact that free nothing on a training batch, as the first training step does."""
    with set_aside(model), restored(model), torch.enable_grad():
        context.checks.is_done = False
        context.checks.said.update(("late", "few rows"))  # the first training step says them
        call_with(model, batch)
        found = context.kept_anyway
    context.kept_anyway = found


def _why_exact(report: ConversionReport, name: str, seen: LayerInput) -> str | None:
    """Say why a layer stays exact, or return None."""
    layer = report.converted[name]
    if name in report.checkpointed and layer.config.checkpointed == "exact":
        return RECOMPUTED
    spec = layer.config.spec(seen.tokens, layer.in_features, seen.itemsize)
    return f"the layer sees {seen.tokens} rows and stays exact" if spec is None else None
