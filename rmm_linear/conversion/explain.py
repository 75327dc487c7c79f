"""Explain what a conversion saves: bytes before and after it by operation and by layer, and what is left and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from rmm_linear._support.tables import table
from rmm_linear.config import RMMConfig
from rmm_linear.conversion.convert import convert, first_names, packed_only, revert
from rmm_linear.conversion.keepers import Keeper, OperationMemory, Reasons, by_operation, keepers
from rmm_linear.conversion.packed import choose_packed
from rmm_linear.conversion.report import ConversionReport
from rmm_linear.memory.inputs import LayerInput, layer_inputs, saved_tensors, unsaved_reason

SHOWN = 0.02  # keepers of a smaller share are summed when an explanation is printed


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer's input.

    Attributes:
        before: Bytes saved for backward now, attributed to this layer.
        after: Bytes saved for backward after the conversion, attributed to this layer.
        reason: Why nothing would be saved, or None.
    """

    before: int
    after: int
    reason: str | None


@dataclass(frozen=True)
class Explanation:
    """The result of :func:`explain`.

    Attributes:
        layers: Name of every layer to convert to its bytes.
        before: Bytes that the whole model saves for the backward pass now.
        after: The same after the conversion.
        operations: "linear", "activation" and so on to the bytes that modules of this operation save, and modules
            inside of them; "other" is what belongs to none. Their sums are ``before`` and ``after``.
        remaining: What is saved after the conversion and is no stand-in, the most bytes first.
        stand_ins: Bytes of stand-ins after the conversion; ``after`` is these and those of ``remaining``.
    """

    layers: dict[str, LayerMemory]
    before: int
    after: int
    operations: dict[str, OperationMemory]
    remaining: list[Keeper]
    stand_ins: int

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain JSON types.

        Returns:
            A dictionary with the keys layers, before, after, operations, remaining and stand_ins.
        """
        return asdict(self)

    def __str__(self) -> str:
        """Return a line with the totals, and tables of the operations, of what is left, and of the layers."""
        share = self.after / max(self.before, 1)
        head = f"rmm_linear: kept_before={self.before} kept_after={self.after} share={share:.3f}"
        rows = [(n, f"{m.before:,}", f"{m.after:,}", m.reason or "") for n, m in self.layers.items()]
        layers = table(("layer", "bytes now", "bytes after", "why nothing is saved"), rows)
        if not self.before and not self.after:
            nothing = "Nothing is saved for the backward pass of this batch: no output of the model needs a gradient."
            return f"{head}\n{nothing}\n\n{layers}"
        sums = [(n, f"{m.before:,}", f"{m.after:,}") for n, m in self.operations.items()]
        parts = [head, table(("operation", "bytes now", "bytes after"), sums)]
        parts += [table(("left, no stand-in", "bytes", "% of now", "why"), self._left())] if self.remaining else []
        return "\n\n".join([*parts, layers]).replace("\n\n", "\n", 1)

    def _left(self) -> list[tuple[str, str, str, str]]:
        large = [keeper for keeper in self.remaining if keeper.share >= SHOWN]
        small = self.remaining[len(large) :]
        rows = [(k.modules or "(model)", f"{k.bytes:,}", f"{100 * k.share:.1f}", k.reason) for k in large]
        if small:
            count = sum(keeper.bytes for keeper in small)
            more = f"and {len(small)} more" if large else f"modules: {len(small)}"
            share = f"{100 * count / max(self.before, 1):.1f}"
            rows.append((more, f"{count:,}", share, f"each below {SHOWN:.0%}, see remaining"))
        return rows


def explain(model: nn.Module, batch: Any, config: RMMConfig | None = None, **overrides: Any) -> Explanation:
    """Run a model before and after a trial conversion and report the bytes saved for backward.

    By operation; by what is left without a stand-in, and why; and by linear layer, where a sketch would not reduce
    them with the reason. Three forward passes in training mode are run, and no
    backward pass. Layers, buffers, random number generators and training mode are restored.

    Args:
        model: A model that is not converted.
        batch: A training batch: a mapping of keyword arguments, a sequence of arguments, or one argument.
        config: As for :func:`rmm_linear.convert`.
        **overrides: As for :func:`rmm_linear.convert`.

    Returns:
        The explanation. Print it.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        >>> found = explain(model, torch.ones(1000, 64), ratio=0.1, target_modules=["0"])
        >>> found.layers["0"]
        LayerMemory(before=256000, after=25608, reason=None)
    """
    report = convert(model, config, dry_run=True, **overrides)
    inputs, before, savers_before = layer_inputs(model, batch, list(report.converted))
    with packed_only(model, report.config, choose_packed(first_names(model), report.config)[0]):
        reasons = {
            name: unsaved_reason(seen) for name, seen in layer_inputs(model, batch, list(report.converted))[0].items()
        }
    exact = {name: _few_rows(report, name, seen) for name, seen in inputs.items()}
    few = {name: reason for name, reason in exact.items() if reason is not None}
    why = Reasons(model, batch, report, first_names(model), few)
    convert(model, config, **overrides)
    try:
        after, savers = saved_tensors(model, batch)
        why.note_attention(model)
    finally:
        revert(model)
    layers: dict[str, LayerMemory] = {}
    for name in report.converted:
        seen = inputs.get(name)
        if seen is None:
            layers[name] = LayerMemory(0, 0, "the batch does not reach this layer")
            continue
        counted = [other.storage for other_name, other in inputs.items() if other_name in layers]
        own = seen.bytes if seen.storage is not None and not seen.others and seen.storage not in counted else 0
        layers[name] = LayerMemory(own, after.by_module.get(name, 0), reasons.get(name) or few.get(name))
    stand_ins, remaining = keepers(after.storages, savers, why, before.total)
    sums = by_operation(report, (before, savers_before), (after, savers))
    return Explanation(layers, before.total, after.total, sums, remaining, stand_ins)


def _few_rows(report: ConversionReport, name: str, seen: LayerInput) -> str | None:
    """Why a layer stays exact."""
    layer = report.converted[name]
    spec = layer.config.spec(seen.tokens, layer.in_features, seen.itemsize)
    return f"the layer sees {seen.tokens} rows and stays exact" if spec is None else None
