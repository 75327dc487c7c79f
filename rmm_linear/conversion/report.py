"""Report a conversion: one line to grep, a table to read, a dictionary to save."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from rmm_linear._support.reports import Report
from rmm_linear._support.tables import grouped, keyed, named_table, prefix_of, wrapped
from rmm_linear.config import RMMConfig
from rmm_linear.context.directions import Directions
from rmm_linear.context.first_steps import MOST_WAITS, WAITING, shown
from rmm_linear.context.learned import GradientRows, ScoreSpread
from rmm_linear.context.model_context import ModelContext
from rmm_linear.conversion.checkpointed import checkpointed_blocks, inside
from rmm_linear.conversion.explanation import Explanation
from rmm_linear.norm_estimators.registry import NONE

_EXACT = "stays exact"  # so ends the reason why a layer saves its input itself, of an explanation too
RECOMPUTED = f"recomputed under activation checkpointing, {_EXACT}"
_ANYWAY = f"what it would free is in memory anyway, {_EXACT}"
_STAYS = "stays: "
_CHECKPOINTED = (
    "checkpointing is on: {} modules are recomputed and stay exact, so they save nothing. Turn it off "
    '(gradient_checkpointing=False), or lower the peak inside of a recomputed block by checkpointed="packed"'
)
_EVAL = "the model is in eval mode: call model.train() before a training step (a Trainer does so itself)"
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
        operation: One of :data:`rmm_linear.config.OPERATIONS`.
        saved: Words for what it saves.
        config: Its configuration.
    """

    name: str
    type: str
    operation: str
    saved: str
    config: RMMConfig


@dataclass(frozen=True, repr=False)
class ConversionReport(Report):
    """The result of :func:`rmm_linear.convert`.

    Attributes:
        config: The configuration of the conversion.
        converted: Name to linear layer, in the model's order.
        skipped: Name to the reason, for every other linear-like layer and for modules of other operations that could
            not be converted.
        dry_run: Whether the model was left unchanged.
        is_eval: Whether the model was in eval mode, in which no step can be trained after the conversion.
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
    is_eval: bool = False
    packed: dict[str, PackedEntry] = field(default_factory=dict)
    checkpointed: tuple[str, ...] = ()
    memory: Explanation | None = None
    unfused: str | None = None
    uncompressed: dict[str, str] = field(default_factory=dict)
    context: ModelContext | None = field(default=None, compare=False)

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
    def widened(self) -> dict[str, tuple[int, float]]:
        """Name to the bits, and to the noise by the gradient before, of the modules whose codes have taken more bits.

        See :mod:`rmm_linear.context.code_noise`.
        """
        if self.context is None:
            return {}
        return {self.context.names[index]: one for index, one in sorted(self.context.noise.widened.items())}

    @property
    def exact_calls(self) -> dict[str, str]:
        """Name to the reason, for every attention, norm and calling module whose last call in training was exact."""
        if self.context is None:
            return {}
        return {self.context.names[index]: why for index, why in sorted(self.context.exact_calls.items())}

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
            memory, rows, directions, wide_attention, widened, kept_anyway, exact_calls, groups, estimator_bytes,
            dry_run and is_eval.
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
            "widened": {name: list(one) for name, one in self.widened.items()},
            "kept_anyway": self.kept_anyway,
            "exact_calls": self.exact_calls,
            "groups": [list(group) for group in self.groups],
            "estimator_bytes": self.estimator_bytes,
            "dry_run": self.dry_run,
            "is_eval": self.is_eval,
        }

    def summary(self) -> str:
        """Return the report's first line.

        Returns:
            ``key=value`` pairs behind ``rmm_linear:``, in a line of 100 columns, or two. Linear layers are
            ``converted`` if they save something compressed, ``exact``, ``exact_recomputed`` by activation
            checkpointing, ``frozen`` or ``skipped``; then follow the modules of the other operations that save
            something compressed. Zeros are left out.
        """
        counts = {name: count for name, count in self._counts().items() if count or name == "converted"}
        counts |= {"dry_run": True} if self.dry_run else {}
        return keyed("rmm_linear:", (f"{name}={count}" for name, count in counts.items()))

    def _counts(self) -> dict[str, int]:
        """Count what becomes of the linear layers, and the modules of other operations that are not exact."""
        reasons = self.linear_exact
        fates = Counter("frozen" if one.frozen else _fate(reasons.get(name)) for name, one in self.converted.items())
        packed = Counter(one.operation for one in self.packed.values() if self._why_exact(one) is None)
        fates["converted"] += packed.pop("linear", 0)
        linear = {name: fates[name] for name in ("converted", "exact", "exact_recomputed", "frozen")}
        return {**linear, "skipped": len(self.skipped), **packed}

    def hints(self) -> list[str]:
        """Return what would save more, two sentences at most."""
        if self.context is not None and self.context.waits >= MOST_WAITS:
            return [WAITING]
        if self.memory is not None:
            return [*self.memory.hints]
        names = [name for name, one in (self.converted | self.packed).items() if self._why_exact(one) == RECOMPUTED]
        return [_CHECKPOINTED.format(len(names))] if names else []

    def __str__(self) -> str:
        """Return :meth:`modules`, and what the whole model saves."""
        return f"{self.modules()}\n\n{self._memory(is_whole=False)}"

    def table(self) -> str:
        """Return a row for every module, and all that the whole model saves.

        Returns:
            Text.
        """
        listed = named_table(("module", "operation", "in → out", "saves"), self._rows())
        return f"{self._head()}\n{listed}\n\n{self._memory(is_whole=True)}"

    def modules(self) -> str:
        """List in short what happens to each module.

        Returns:
            The summary line, hints, what the modules of each operation save, and a table in which modules that differ
            in numbers of their names share a row. What differs from the others of an operation follows.
        """
        silent, others = dict[str, list[str]](), dict[str, list[str]]()
        listed, usual = list[tuple[str, str]](), self._usual()
        for name, operation, _, saves in self._rows():
            if saves in (_FROZEN, RECOMPUTED):
                silent.setdefault(saves, []).append(name)
            elif saves == usual.get(operation):
                listed.append((name, operation))
            else:
                others.setdefault(saves, []).append(name)
        rows = [(pattern, str(len(names)), *rest) for pattern, names, rest in grouped(listed)]
        lines = [self._head()]
        if usual:
            same = {saves: [one for one in usual if usual[one] == saves] for saves in usual.values()}
            lines.append(wrapped("; ".join(f"{' and '.join(of)}: {saves}" for saves, of in same.items()), 2))
        if rows:
            lines.append(named_table(("module", "count", "operation"), rows))
        for saves, names in others.items():
            patterns = ", ".join(pattern for pattern, _, _ in grouped((name, "") for name in names))
            lines.append(wrapped(f"{patterns}: {saves}", 2))
        prefix = prefix_of([row[0] for row in rows])
        for why, names in silent.items():
            said = "frozen and save nothing" if why == _FROZEN else why.replace(_EXACT, "and stay exact")
            few = shown([name.removeprefix(prefix) for name in names])
            lines.append(wrapped(f"{len(names)} modules are {said}: {few}", 2))
        return "\n".join(lines)

    def _head(self) -> str:
        unfused = [] if self.unfused is None else self.unfused.split("\n")
        hints = [*self.hints(), *([_EVAL] if self.is_eval else [])]
        lines = [self.summary(), *(wrapped(f"hint: {hint}", 2) for hint in hints)]
        return "\n".join([*lines, *(wrapped(line, 2) for line in unfused)])

    def _memory(self, *, is_whole: bool) -> str:
        if self.memory is None:
            return _NOT_MEASURED
        line = f"{wrapped(self.memory.line(), 2)}{self.memory.note()}"
        return f"{line}\n\n{self.memory.tables(is_whole=is_whole)}"

    def _usual(self) -> dict[str, str]:
        """Return what most modules of an operation save, if several save the same."""
        counts: dict[str, Counter[str]] = {}
        for _, operation, _, saves in self._rows():
            if operation and saves not in (_FROZEN, RECOMPUTED) and not saves.endswith(_EXACT):
                counts.setdefault(operation, Counter())[saves] += 1
        return {operation: found.most_common(1)[0][0] for operation, found in counts.items()}

    def _records(self) -> list[dict[str, Any]]:
        found = list[dict[str, Any]]()
        for name, operation, _, saves in self._rows():
            layer, entry = self.converted.get(name), self.converted.get(name) or self.packed.get(name)
            sizes = (None, None) if layer is None else (layer.in_features, layer.out_features)
            known = {"type": None if entry is None else entry.type, "operation": operation or None}
            found.append({"module": name, **known, "in_features": sizes[0], "out_features": sizes[1], "saves": saves})
        return found

    def _rows(self) -> list[tuple[str, str, str, str]]:
        """Return name, operation, sizes and what is saved of all modules."""
        left = {} if self.memory is None else {one.modules: one.bytes for one in self.memory.remaining}
        rows = [
            (
                layer.name,
                "linear",
                f"{layer.in_features} → {layer.out_features}",
                _FROZEN if layer.frozen else self._why_exact(layer) or f"{_saved(layer)}{self._learned(layer.name)}",
            )
            for layer in self.converted.values()
        ]
        rows += [
            (one.name, one.operation, "", self._why_exact(one) or f"{one.saved}{self._learned(one.name)}")
            for one in self.packed.values()
        ]
        rows += [(name, "", "", f"skipped: {reason}") for name, reason in self.skipped.items()]
        kept = grouped((name, kind) for name, kind in self.uncompressed.items())
        for pattern, names, (kind,) in kept:
            size = f", {left[pattern]:,} bytes" if pattern in left else ""
            rows += [(name, "", "", f"{_STAYS}{kind}{size}") for name in names]
        return rows

    def _learned(self, name: str) -> str:
        """Say what a module has learned in its first steps."""
        if name in self.wide_attention:
            return f"; 8 for queries and keys, as scores spread by {self.wide_attention[name]:.1f}"
        if name in self.widened:
            bits, noise = self.widened[name]
            return f"; now {bits} bits, as noise was {noise:.2g} of the gradient"
        of_directions = f"; {self.directions[name]} fixed directions in 8 bits" if name in self.directions else ""
        return of_directions + (f"; of {self.rows[name]} alone" if name in self.rows else "")

    def _why_exact(self, module: ConvertedLayer | PackedEntry) -> str | None:
        if module.name in self.checkpointed and module.config.checkpointed == "exact":
            return RECOMPUTED
        if module.name in self.kept_anyway:
            return _ANYWAY
        if module.name in self.exact_calls:
            return f"{self.exact_calls[module.name]}: {_EXACT}"
        seen = None if self.memory is None else self.memory.layers.get(module.name)
        reason = None if seen is None else seen.reason
        return reason if reason is not None and reason.endswith(_EXACT) else None


_FROZEN = "frozen"


def _fate(reason: str | None) -> str:
    """Return the key of the count of a linear layer that is exact for a reason."""
    return {None: "converted", RECOMPUTED: "exact_recomputed"}.get(reason, "exact")


def _sketch_fields(config: RMMConfig) -> dict[str, Any]:
    return {k: v for k, v in config.to_dict().items() if k not in ("target_modules", "exclude_modules", "overrides")}


def _amount(config: RMMConfig, between: str) -> str:
    said = [f"{name}{between}{value:g}" for name in ("ratio", "memory") if (value := getattr(config, name)) is not None]
    if config.ratio is None or config.bits != "auto":
        said.append(f"bits{between}{config.width(1, 1) if config.memory is None else config.bits}")
    return " ".join(said)


def _saved(layer: ConvertedLayer) -> str:
    config = layer.config
    if config.memory is None and config.ratio is None:
        has_none = config.directions and not Directions(config.directions).fits(layer.in_features)
        few = ", too narrow for directions" if has_none else ""
        return "its rows as they are" if config.bits is None else f"its rows, {config.width(1, 1)} bits{few}"
    block = "" if config.block is None else f", blocks of {config.block}"
    expected = "" if config.norm_estimator == NONE else f", by {config.norm_estimator}"
    return f"{config.kind}{expected}, {_amount(config, ' ')}, at least {config.min_rows} rows{block}"
