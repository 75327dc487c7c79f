"""Explain what a conversion saves: the bytes of every layer's input before and after it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from rmm_linear._support.tables import table
from rmm_linear.config import RMMConfig
from rmm_linear.conversion.convert import convert, first_names, packed_only, revert
from rmm_linear.conversion.packed import choose_packed
from rmm_linear.memory.inputs import layer_inputs, unsaved_reason


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
    """

    layers: dict[str, LayerMemory]
    before: int
    after: int

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain JSON types.

        Returns:
            A dictionary with the keys layers, before and after.
        """
        return asdict(self)

    def __str__(self) -> str:
        """Return a line with the totals and a table of the layers."""
        share = self.after / max(self.before, 1)
        rows = [(n, f"{m.before:,}", f"{m.after:,}", m.reason or "") for n, m in self.layers.items()]
        head = f"rmm_linear: kept_before={self.before} kept_after={self.after} share={share:.3f}"
        return f"{head}\n{table(('layer', 'bytes now', 'bytes after', 'why nothing is saved'), rows)}"


def explain(model: nn.Module, batch: Any, config: RMMConfig | None = None, **overrides: Any) -> Explanation:
    """Run a model before and after a trial conversion and report the bytes saved for backward by each layer.

    Where a sketch would not reduce them, the report says why. Three forward passes in training mode are run, and no
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
    inputs, before = layer_inputs(model, batch, list(report.converted))
    with packed_only(model, report.config, choose_packed(first_names(model), report.config)[0]):
        reasons = {
            name: unsaved_reason(seen) for name, seen in layer_inputs(model, batch, list(report.converted))[0].items()
        }
    convert(model, config, **overrides)
    try:
        _, after = layer_inputs(model, batch, [])
    finally:
        revert(model)
    layers: dict[str, LayerMemory] = {}
    for name, layer in report.converted.items():
        seen = inputs.get(name)
        if seen is None:
            layers[name] = LayerMemory(0, 0, "the batch does not reach this layer")
            continue
        counted = [other.storage for other_name, other in inputs.items() if other_name in layers]
        own = seen.bytes if seen.storage is not None and not seen.others and seen.storage not in counted else 0
        spec = layer.config.spec(seen.tokens, layer.in_features, seen.itemsize)
        reason = reasons.get(name)
        if spec is None and reason is None:
            reason = f"the layer sees {seen.tokens} rows and stays exact"
        layers[name] = LayerMemory(own, after.by_module.get(name, 0), reason)
    return Explanation(layers, before.total, after.total)
