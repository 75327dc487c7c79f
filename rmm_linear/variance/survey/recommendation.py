"""Recommend the kind and width of sketch with the lowest variance ratio, layer by layer.

Hashing adds variance for pairs of tokens that collide, K · Var ≈ P + g − 2d for any data. Sampling adds variance for
the tokens it leaves out, K · Var = Σ dᵢ/pᵢ − g, which is small if the gradients of the tokens agree, or if a few tokens
have most of the gradient and a large pᵢ. Which is smaller depends on the layer and its data, so both are computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rmm_linear._support.tables import table
from rmm_linear.sketches import KINDS
from rmm_linear.variance.survey.records import LayerRecord
from rmm_linear.variance.survey.survey import MemoryNoise, noise_at_memory


def recommend(
    records: Sequence[LayerRecord], *, memory: float, kinds: Sequence[str] = KINDS, itemsize: int = 2, draws: int = 1
) -> list[MemoryNoise]:
    """Return the kind and width with the lowest variance ratio for every layer, at one memory.

    For norm_rows and wta, no gradient norms are predicted: a norm estimator lowers their variance further.

    Args:
        records: X and Y of every layer, see :func:`rmm_linear.variance.record_layers`.
        memory: Saved bytes as a fraction of the input's bytes, in (0, 1].
        kinds: Some of :data:`rmm_linear.sketches.KINDS`.
        itemsize: Bytes per element of the input: 4 for float32, 2 for half types.
        draws: As for :func:`rmm_linear.variance.sketch_variance`.

    Returns:
        One entry for every layer: its kind is ``setting``. For ``RMMConfig(memory=memory, overrides=...)``, take
        ``{entry.layer: {"kind": entry.setting, "bits": entry.bits}}`` where ``bits`` is
        one of a code (8, 4, 3, 2, 1.6, 1), else None.

    Example:
        >>> import torch
        >>> one_token = torch.zeros(100, 8).index_fill(0, torch.tensor([3]), 1.0)  # all there is
        >>> record = LayerRecord("dense", one_token + 1e-3, torch.ones(100, 4), (10, 10), None)
        >>> (best,) = recommend([record], memory=0.1, kinds=["rows", "wta"])
        >>> best.setting
        'wta'
    """
    noises = noise_at_memory(records, kinds=kinds, memories=[memory], itemsize=itemsize, draws=draws)
    return quietest([entry for entry in noises if entry.setting in kinds])


def quietest(noises: Sequence[MemoryNoise]) -> list[MemoryNoise]:
    """Return the entry with the lowest variance ratio for every layer and memory; of several, the first.

    Args:
        noises: See :func:`rmm_linear.variance.noise_at_memory`.

    Returns:
        The entries, in the order in which their layers and memories come first.
    """
    found: dict[tuple[str, float], list[MemoryNoise]] = {}
    for entry in noises:
        found.setdefault((entry.layer, entry.memory), []).append(entry)
    return [min(entries, key=lambda e: (math.isnan(e.noise), e.noise)) for entries in found.values()]


def describe_layers(noises: Sequence[MemoryNoise], kinds: Sequence[str] = KINDS) -> str:
    """Return a table of the kind and width with the lowest variance ratio: a row per layer, a column per memory."""
    best = {(e.layer, e.memory): e for e in quietest([entry for entry in noises if entry.setting in kinds])}
    layers, memories = dict.fromkeys(layer for layer, _ in best), dict.fromkeys(memory for _, memory in best)
    header = ("lowest variance ratio", *(f"{100 * memory:g} %" for memory in memories))

    def cell(entry: MemoryNoise) -> str:
        return f"{entry.setting}, {entry.bits} bits: {entry.noise:.3f}"

    return table(header, [(layer, *(cell(best[layer, memory]) for memory in memories)) for layer in layers])
