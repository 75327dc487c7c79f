"""Report what a conversion saves: bytes before and after, by operation and by layer; what remains and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rmm_linear._support.tables import table
from rmm_linear.conversion.checkpointed import BlockMemory

SHOWN = 0.02  # modules with a smaller share are summed when an explanation is printed


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
        modules: Their name; where several differ in numbers only, ``layer.*.name``; "" is the model itself.
        bytes: Bytes that they save uncompressed, each storage counted for the module that saves it first.
        share: ``bytes`` divided by all that the model saves now.
        reason: Why.
    """

    modules: str
    bytes: int
    share: float
    reason: str


@dataclass(frozen=True)
class Explanation:
    """The result of :func:`explain`.

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

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain JSON types.

        Returns:
            A dictionary with the keys layers, before, after, operations, remaining, stand_ins, recomputed, unfused and
            kinds.
        """
        return asdict(self)

    def line(self) -> str:
        """Return the totals, the share of each operation's bytes that remains, and what stays uncompressed.

        Returns:
            One line.
        """
        parts = [
            f"{name} {memory.after / memory.before:.0%}" for name, memory in self.operations.items() if memory.before
        ]
        share = self.after / max(self.before, 1)
        text = f"saved for backward: {_change(self.before, self.after)} MiB ({share:.0%}): {', '.join(parts)}"
        shares = {kind: count / max(self.before, 1) for kind, count in self.kinds.items()}
        if large := [f"{share:.0%} stays: {kind}" for kind, share in shares.items() if share >= SHOWN]:
            text += f"; {', '.join(large)}"
        if self.recomputed is not None:
            text += f"; {self._recomputed_line(self.recomputed)}"
        return text

    def _recomputed_line(self, block: BlockMemory) -> str:
        change = f"stays {_mib(block.before)}" if block.after == block.before else _change(block.before, block.after)
        text = f"while activation checkpointing recomputes {block.name}, inside of it: {change} MiB"
        if block.packed < block.after:
            text += f', and checkpointed="packed" would make it {_mib(block.packed)} MiB'
        return text

    def __str__(self) -> str:
        """Return lines with the totals, and tables of the operations, of what remains, and of the layers."""
        share = self.after / max(self.before, 1)
        head = f"rmm_linear: saved_before={self.before} saved_after={self.after} share={share:.3f}"
        rows = [(n, f"{m.before:,}", f"{m.after:,}", m.reason or "") for n, m in self.layers.items()]
        layers = table(("layer", "bytes now", "bytes after", "why it does not shrink"), rows)
        line = f"{self.line()}\n\n" if self.before or self.after else ""
        hint = "" if self.unfused is None else f"\n\n{self.unfused}"
        return f"{line}{head}\n{self.tables()}\n\n{layers}{hint}"

    def tables(self) -> str:
        """Return what each operation saves, and what is still saved uncompressed.

        Returns:
            Two tables, or why there are none.
        """
        if not self.before and not self.after:
            return "Nothing is saved for the backward pass of this batch: no output of the model needs a gradient."
        sums = [(n, f"{m.before:,}", f"{m.after:,}") for n, m in self.operations.items()]
        parts = [table(("operation", "bytes now", "bytes after"), sums)]
        parts += (
            [table(("still saved, not compressed", "bytes", "% of now", "why"), self._left())] if self.remaining else []
        )
        return "\n\n".join(parts)

    def _left(self) -> list[tuple[str, str, str, str]]:
        large = [found for found in self.remaining if found.share >= SHOWN]
        small = self.remaining[len(large) :]
        rows = [(k.modules or "(model)", f"{k.bytes:,}", f"{100 * k.share:.1f}", k.reason) for k in large]
        if small:
            count = sum(found.bytes for found in small)
            more = f"and {len(small)} more" if large else f"modules: {len(small)}"
            share = f"{100 * count / max(self.before, 1):.1f}"
            rows.append((more, f"{count:,}", share, f"each below {SHOWN:.0%}, see remaining"))
        return rows


def _change(before: int, after: int) -> str:
    return f"{_mib(before)} → {_mib(after)}"


def _mib(count: int) -> str:
    return f"{count / 2**20:.{1 if count >= 10 * 2**20 else 2}f}"
