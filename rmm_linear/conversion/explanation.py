"""Report what a conversion saves: bytes before and after, by operation and by layer; what remains and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rmm_linear._support.reports import Report
from rmm_linear._support.tables import grouped, named_table, table, wrapped
from rmm_linear.conversion.checkpointed import BlockMemory

OTHERS = "others"  # what has no word of its own among what stays uncompressed
SHOWN = 0.02  # modules with a smaller share are summed when an explanation is printed
_LEAST = 0.005  # operations with a smaller share are not in the line


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
class OperationMemory:
    """Bytes of the modules of one operation.

    Attributes:
        before: Bytes saved for backward now.
        after: Bytes saved for backward after the conversion.
    """

    before: int
    after: int


@dataclass(frozen=True)
class Keeper:
    """Modules that still save something uncompressed after the conversion.

    Attributes:
        modules: Their name; where several differ in numbers only, ``layer.{0-5}.name``; "" is the model itself.
        bytes: Bytes that they save uncompressed, each storage counted for the module that saves it first.
        share: ``bytes`` divided by all that the model saves now.
        reason: Why.
    """

    modules: str
    bytes: int
    share: float
    reason: str


@dataclass(frozen=True, repr=False)
class Explanation(Report):
    """The result of :func:`explain`. All shares are of what the whole model saved before.

    Attributes:
        layers: Name of every layer to convert to its bytes.
        before: Bytes that the whole model saves for the backward pass now.
        after: The same after the conversion.
        operations: "linear", "activation" and so on to the bytes that modules of this operation save, and modules
            inside of them; "other" is what belongs to none. Their sums are ``before`` and ``after``.
        remaining: Modules that still save something uncompressed, the most bytes first.
        stand_ins: Bytes of compressed activations; ``after`` is the sum of these and of ``remaining``.
        recomputed: Bytes of the first block that activation checkpointing recomputes, while it does; or None.
        unfused: See :class:`~rmm_linear.ConversionReport`.
        kinds: What ``remaining`` is of, such as "experts", to its bytes, the most bytes first.
        hints: What would save most of what remains, two sentences at most.
    """

    layers: dict[str, LayerMemory]
    before: int
    after: int
    operations: dict[str, OperationMemory]
    remaining: list[Keeper]
    stand_ins: int
    recomputed: BlockMemory | None = None
    unfused: str | None = None
    kinds: dict[str, int] = field(default_factory=dict)
    hints: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain JSON types.

        Returns:
            A dictionary with the keys layers, before, after, operations, remaining, stand_ins, recomputed, unfused,
            kinds and hints.
        """
        return asdict(self)

    def summary(self) -> str:
        """Return the totals as ``key=value`` pairs.

        Returns:
            One line.
        """
        share = self.after / max(self.before, 1)
        return f"rmm_linear: saved_before={self.before} saved_after={self.after} share={share:.3f}"

    def line(self) -> str:
        """Return the totals, and the shares of what the model saved before: by operation, and what stays uncompressed.

        Returns:
            One line.
        """
        shares = {name: self.share_of(memory.after) for name, memory in self.operations.items()}
        parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= _LEAST)
        text = f"saved for backward: {_change(self.before, self.after)} MiB ({self.share_of(self.after):.0%})"
        text += f": {parts}" if parts else ""
        found = {kind: self.share_of(count) for kind, count in self.kinds.items()}
        if large := {kind: share for kind, share in found.items() if share >= SHOWN}:
            kinds = ", ".join(f"{share:.0%} {kind}" for kind, share in large.items())
            named = "" if [*large] == [OTHERS] else f": {kinds}"
            text += f"; {sum(large.values()):.0%} stay uncompressed{named}"
        return text

    def note(self) -> str:
        """Return what a recomputed block saves while it is recomputed, in lines of its own; "" where none is."""
        return "" if self.recomputed is None else f"\n{wrapped(_recomputed_line(self.recomputed), 2)}"

    def _text(self, *, is_whole: bool) -> str:
        """Write the totals, hints, and tables: of operations, of what remains, and of layers, all of them or a few."""
        line = f"\n{wrapped(self.line(), 2)}" if self.before or self.after else ""
        hints = "".join(f"\n{wrapped(f'hint: {hint}', 2)}" for hint in self.hints)
        between = "\n\n" if line else "\n"
        parts = [f"{self.summary()}{line}{hints}{self.note()}{between}{self.tables(is_whole=is_whole)}"]
        parts += [*filter(None, [self._layers(is_whole), wrapped(self.unfused or "", 2)])]
        return "\n\n".join(parts)

    def tables(self, *, is_whole: bool = False) -> str:
        """Return what each operation saves, and what is still saved uncompressed.

        Args:
            is_whole: Whether operations that save nothing and small modules have rows too.

        Returns:
            Two tables, or why there are none.
        """
        if not self.before and not self.after:
            return "Nothing is saved for the backward pass of this batch: no output of the model needs a gradient."
        sums = [
            (n, f"{m.before:,}", self._percent(m.before), f"{m.after:,}", self._percent(m.after))
            for n, m in self.operations.items()
            if is_whole or m.before or m.after
        ]
        total = ("all", f"{self.before:,}", self._percent(self.before), f"{self.after:,}", self._percent(self.after))
        parts = [table(("operation", "bytes before", "%", "bytes after", "% of before"), [*sums, total])]
        if rows := self._left(is_whole):
            parts.append(named_table(("still saved, not compressed", "bytes", "% of before", "why"), rows))
        return "\n\n".join(parts)

    def _layers(self, is_whole: bool) -> str:
        """Return a table of the linear layers: of those that save something, like ones in a row; or of all."""
        if is_whole:
            rows = [(n, "1", f"{m.before:,}", f"{m.after:,}", m.reason or "") for n, m in self.layers.items()]
        else:
            seen = {name: one for name, one in self.layers.items() if one.before or one.after}
            groups = grouped((name, str(m.before), str(m.after), m.reason or "") for name, m in seen.items())
            rows = [
                (pattern, str(len(names)), f"{len(names) * int(before):,}", f"{len(names) * int(after):,}", reason)
                for pattern, names, (before, after, reason) in groups
            ]
        if not rows:
            return ""
        silent = 0 if is_whole else sum(not one.before and not one.after for one in self.layers.values())
        left_out = f"\nLinear layers that save nothing of their own: {silent}" if silent else ""
        header = ("layer", "count", "bytes before", "bytes after", "why not less")
        return f"{named_table(header, rows)}{left_out}"

    def _records(self) -> list[dict[str, Any]]:
        return [{"layer": name, **vars(memory)} for name, memory in self.layers.items()]

    def _left(self, is_whole: bool) -> list[tuple[str, ...]]:
        large = [found for found in self.remaining if is_whole or found.share >= SHOWN]
        small = self.remaining[len(large) :]
        rows = [(k.modules, f"{k.bytes:,}", f"{100 * k.share:.1f}", k.reason) for k in large]
        count = sum(found.bytes for found in small)
        if (large and small) or self.share_of(count) >= SHOWN:
            reason = f"each below {SHOWN:.0%}, see table()"
            rows.append((f"and {len(small)} more", f"{count:,}", self._percent(count), reason))
        return rows

    def share_of(self, count: int) -> float:
        """Return the share of so many bytes in what the whole model saved before."""
        return count / max(self.before, 1)

    def _percent(self, count: int) -> str:
        return f"{100 * self.share_of(count):.1f}"


def _recomputed_line(block: BlockMemory) -> str:
    change = f"stays {_mib(block.before)}" if block.after == block.before else _change(block.before, block.after)
    text = f"While activation checkpointing recomputes {block.name}, inside of it: {change} MiB"
    if block.packed < block.after:
        text += f', and checkpointed="packed" would make it {_mib(block.packed)} MiB'
    return f"{text}."


def _change(before: int, after: int) -> str:
    return f"{_mib(before)} → {_mib(after)}"


def _mib(count: int) -> str:
    return f"{count / 2**20:.{1 if count >= 10 * 2**20 else 2}f}"
