"""Report a conversion: one line to grep, a table to read, a dictionary to save."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from rmm_linear._support.tables import pattern_of, table
from rmm_linear.config import RMMConfig
from rmm_linear.context.learned import GradientRows, ScoreSpread
from rmm_linear.context.model_context import ModelContext
from rmm_linear.conversion.checkpointed import checkpointed_blocks, inside
from rmm_linear.conversion.explanation import Explanation
from rmm_linear.norm_estimators.registry import NONE

_EXACT = "stays exact"  # so ends the reason why a layer saves its input itself, of an explanation too
RECOMPUTED = f"recomputed under activation checkpointing, {_EXACT}"
_ANYWAY = f"another operation keeps what it would free, {_EXACT}"
_STAYS = "stays: "
_NOT_MEASURED = "To measure what the whole model saves, pass a batch: convert(model, example=batch)."


@dataclass(frozen=True)
class ConvertedLayer:
    """One layer of a conversion.

    Attributes:
        name: Dotted name in the model.
        type: Class of the original layer.
        in_features: I.
        out_features: O.
        config: How the layer saves its input.
        frozen: Whether its weight required no gradient: then it saves nothing, until it is unfrozen.
    """

    name: str
    type: str
    in_features: int
    out_features: int
    config: RMMConfig
    frozen: bool = False


@dataclass(frozen=True)
class PackedEntry:
    """One module of a conversion that saves a packed activation.

    Attributes:
        name: Dotted name in the model.
        type: Class of the original module.
        operation: "activation", "norm", "attention", "dropout", "logits" or "experts".
        saved: Words for what it saves.
        config: Its configuration.
    """

    name: str
    type: str
    operation: str
    saved: str
    config: RMMConfig


@dataclass(frozen=True)
class ConversionReport:
    """The result of :func:`rmm_linear.convert`.

    Attributes:
        config: The configuration of the conversion.
        converted: Name to linear layer, in the model's order.
        skipped: Name to the reason, for every other linear-like layer and for modules of other operations that could
            not be converted.
        dry_run: Whether the model was left unchanged.
        packed: Name to module of the other operations, in the model's order.
        checkpointed: Names of those, of both kinds, that are inside of blocks that activation checkpointing recomputes,
            as far as the model says so.
        memory: Bytes that the whole model saves before and after, if there was an ``example``.
        unfused: Where ``fused=True`` has no effect on the model as it is now, and why, norms under autocast among it;
            None where it has one everywhere, or is not set.
        uncompressed: Name to a word or two, such as "experts" or "convolutions", for modules with weights whose inputs
            nothing compresses.
        context: The state shared by the converted modules, from which ``bits`` and ``groups`` are read; None after a
            dry run.
    """

    config: RMMConfig
    converted: dict[str, ConvertedLayer] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    dry_run: bool = False
    packed: dict[str, PackedEntry] = field(default_factory=dict)
    checkpointed: tuple[str, ...] = ()
    memory: Explanation | None = None
    unfused: str | None = None
    uncompressed: dict[str, str] = field(default_factory=dict)
    context: ModelContext | None = field(default=None, repr=False, compare=False)

    @property
    def frozen(self) -> list[str]:
        """Names of the converted layers whose weight required no gradient, and which therefore save nothing."""
        return [name for name, layer in self.converted.items() if layer.frozen]

    @property
    def linear_exact(self) -> dict[str, str]:
        """Name to the reason, for every converted linear layer that is known to stay exact."""
        reasons = {name: self._why_exact(layer) for name, layer in self.converted.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    @property
    def rows(self) -> dict[str, str]:
        """Name to the rows that are saved, for every module that has learned which rows have a gradient."""
        if self.context is None:
            return {}
        names, learned = self.context.names, sorted(self.context.learned.items())
        found = {names[index]: one.pattern for index, one in learned if isinstance(one, GradientRows)}
        return {
            name: "the first of every sequence" if rows > 0 else "the last of every sequence"
            for name, rows in found.items()
            if rows
        }

    @property
    def directions(self) -> dict[str, int]:
        """Name to the number of fixed directions, for every layer that has some."""
        if self.context is None:
            return {}
        found = sorted(self.context.directions.items())
        return {self.context.names[index]: one.count for index, one in found if one.basis is not None}

    @property
    def wide_attention(self) -> dict[str, float]:
        """Name to the standard deviation of the scores, for every attention that has taken 8 bits for it."""
        if self.context is None:
            return {}
        learned = sorted(self.context.learned.items())
        spreads = {self.context.names[index]: one for index, one in learned if isinstance(one, ScoreSpread)}
        return {name: one.largest for name, one in spreads.items() if one.is_large}

    @property
    def kept_anyway(self) -> list[str]:
        """Names of the modules that are exact since the first step or the example, as a code frees nothing there."""
        return [] if self.context is None else [self.context.names[index] for index in sorted(self.context.kept_anyway)]

    @property
    def exact_attention(self) -> dict[str, str]:
        """Name to the reason, for every attention whose last call in training was exact."""
        if self.context is None:
            return {}
        return {self.context.names[index]: why for index, why in sorted(self.context.exact_attention.items())}

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Groups of names of layers that share one sketch of their common input."""
        if self.context is None:
            return []
        return [
            tuple(self.context.names[index] for index in group) for group in sorted(self.context.sketch_cache.groups)
        ]

    @property
    def estimator_bytes(self) -> dict[str, int]:
        """Name to bytes of the norm estimator, for every layer with one; sample caches are in host memory."""
        if self.context is None:
            return {}
        return {self.context.names[index]: e.bytes for index, e in sorted(self.context.estimators.items())}

    def in_training(self, model: nn.Module) -> ConversionReport:
        """Return the report of a model that may have turned on activation checkpointing after its conversion.

        Args:
            model: The converted model.

        Returns:
            A copy whose ``checkpointed`` is what the model says now.
        """
        return replace(self, checkpointed=inside(checkpointed_blocks(model), [*self.converted, *self.packed]))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON types.

        Returns:
            A dictionary with the keys config, converted, packed, skipped, checkpointed, unfused, uncompressed,
            memory, rows, directions, wide_attention, kept_anyway, exact_attention, groups, estimator_bytes and
            dry_run.
        """
        converted = {
            name: {**vars(layer), "config": _sketch_fields(layer.config)} for name, layer in self.converted.items()
        }
        packed = self.packed.items()
        return {
            "config": self.config.to_dict(),
            "converted": converted,
            "packed": {name: {"type": e.type, "operation": e.operation, "saved": e.saved} for name, e in packed},
            "skipped": dict(self.skipped),
            "checkpointed": list(self.checkpointed),
            "unfused": self.unfused,
            "uncompressed": dict(self.uncompressed),
            "memory": None if self.memory is None else self.memory.to_dict(),
            "rows": self.rows,
            "directions": self.directions,
            "wide_attention": self.wide_attention,
            "kept_anyway": self.kept_anyway,
            "exact_attention": self.exact_attention,
            "groups": [list(group) for group in self.groups],
            "estimator_bytes": self.estimator_bytes,
            "dry_run": self.dry_run,
        }

    def summary(self) -> str:
        """Return the report's first line.

        Returns:
            One line of ``key=value`` pairs behind ``rmm_linear:``.
        """
        config = self.config
        exact = {n for n in self.checkpointed if config.for_module(n).checkpointed == "exact"} - {*self.frozen}
        counts = Counter(e.operation for e in self.packed.values() if e.name not in exact)
        converted = len({*self.converted} - {*self.frozen} - exact) + counts.pop("linear", 0)
        packed = "".join(f" {name}={count}" for name, count in counts.items())
        recomputed = f" exact_recomputed={len(exact)}" if exact else ""
        return (
            f"rmm_linear: converted={converted}{packed}{recomputed} skipped={len(self.skipped)} "
            f"frozen={len(self.frozen)} kind={config.kind} {_amount(config, '=')} min_rows={config.min_rows} "
            f"dry_run={self.dry_run}"
        )

    def __str__(self) -> str:
        """Return :meth:`modules`, and what the whole model saves."""
        memory = _NOT_MEASURED if self.memory is None else f"{self.memory.line()}\n\n{self.memory.tables()}"
        return f"{self.modules()}\n\n{memory}"

    def modules(self) -> str:
        """List what happens to each module.

        Returns:
            The summary line, and a table in which numbered siblings share a row.
        """
        left = {} if self.memory is None else {one.modules: f", {one.bytes:,} bytes" for one in self.memory.remaining}
        rows = [
            (pattern, str(len(names)), *cells, saved + (left.get(pattern, "") if saved.startswith(_STAYS) else ""))
            for (pattern, *cells, saved), names in _grouped(self._rows()).items()
        ]
        hint = "" if self.unfused is None else f"\n{self.unfused}"
        return f"{self.summary()}\n{table(('module', 'count', 'in', 'out', 'saved'), rows)}{hint}"

    def _rows(self) -> list[tuple[str, ...]]:
        converted = [
            (
                layer.name,
                str(layer.in_features),
                str(layer.out_features),
                self._why_exact(layer) or f"{_saved(layer)}{self._learned(layer.name)}",
            )
            for layer in self.converted.values()
        ]
        packed = [
            (
                entry.name,
                "",
                "",
                f"{entry.operation}: {self._why_exact(entry) or f'{entry.saved}{self._learned(entry.name)}'}",
            )
            for entry in self.packed.values()
        ]
        skipped = [(name, "", "", f"skipped: {reason}") for name, reason in self.skipped.items()]
        return converted + packed + skipped + [(n, "", "", f"{_STAYS}{kind}") for n, kind in self.uncompressed.items()]

    def _learned(self, name: str) -> str:
        """Say what a module has learned in its first steps."""
        if name in self.wide_attention:
            return f"; 8 for queries and keys, as scores spread by {self.wide_attention[name]:.1f}"
        of_directions = f"; {self.directions[name]} fixed directions in 8 bits" if name in self.directions else ""
        return of_directions + (f"; of {self.rows[name]} alone" if name in self.rows else "")

    def _why_exact(self, module: ConvertedLayer | PackedEntry) -> str | None:
        if module.name in self.checkpointed and module.config.checkpointed == "exact":
            return RECOMPUTED
        if module.name in self.kept_anyway:
            return _ANYWAY
        if module.name in self.exact_attention:
            return f"{self.exact_attention[module.name]}: {_EXACT}"
        seen = None if self.memory is None else self.memory.layers.get(module.name)
        reason = None if seen is None else seen.reason
        return reason if reason is not None and reason.endswith(_EXACT) else None


def _sketch_fields(config: RMMConfig) -> dict[str, Any]:
    return {k: v for k, v in config.to_dict().items() if k not in ("target_modules", "exclude_modules", "overrides")}


def _amount(config: RMMConfig, between: str) -> str:
    said = [f"{name}{between}{value:g}" for name in ("ratio", "memory") if (value := getattr(config, name)) is not None]
    if config.ratio is None or config.bits != "auto":
        said.append(f"bits{between}{config.width(1, 1) if config.memory is None else config.bits}")
    return " ".join(said)


def _saved(layer: ConvertedLayer) -> str:
    if layer.frozen:
        return "nothing: frozen"
    config = layer.config
    if config.memory is None and config.ratio is None:
        return "its rows as they are" if config.bits is None else f"its rows, {config.width(1, 1)} bits"
    block = "" if config.block is None else f", blocks of {config.block}"
    expected = "" if config.norm_estimator == NONE else f", by {config.norm_estimator}"
    return f"{config.kind}{expected}, {_amount(config, ' ')}, at least {config.min_rows} rows{block}"


def _grouped(rows: list[tuple[str, ...]]) -> dict[tuple[str, ...], list[str]]:
    """Group rows that differ in one number of their name only: layer.0.query, layer.1.query → layer.*.query."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        groups.setdefault((pattern_of(name), *cells), []).append(name)
    return {(names[0] if len(names) == 1 else key[0], *key[1:]): names for key, names in groups.items()}
