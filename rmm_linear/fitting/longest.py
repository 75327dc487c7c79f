"""The longest sequence that fits into memory: exact, with every block recomputed, and with a plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from torch import nn

from rmm_linear._support.progress import reporting
from rmm_linear._support.quiet import quiet
from rmm_linear._support.reports import Report
from rmm_linear._support.sizes import read_bytes, show_both, show_bytes
from rmm_linear._support.tables import keyed, table, wrapped
from rmm_linear._support.validation import check_integer
from rmm_linear.context.checkpointing import REPLACE, uncheckpointed
from rmm_linear.fitting.fit import check_arguments
from rmm_linear.fitting.fitting import Fitting
from rmm_linear.fitting.options import ALLOW
from rmm_linear.fitting.search import MOST, Sizes, SizeSearch, check_size
from rmm_linear.planning.blocks.find import owner_of
from rmm_linear.planning.blocks.plan import BlockPlan
from rmm_linear.planning.step.divided import divided
from rmm_linear.planning.step.resize import length_of, lengthened, resized, usable_positions
from rmm_linear.planning.step.shards import Shards
from rmm_linear.planning.step.step import has_memory
from rmm_linear.planning.step.watch import watch

# Tokens; without weights, a step takes as long to simulate whatever its length. Bytes are lines of the length piece by
# piece, so options are measured near the longest sequence: where a token takes a thirtieth of what it takes exactly.
_FIRST, _SHARE = 16384, 30
_TOLERANCE = 0.005


@dataclass(frozen=True, repr=False)
class LongestSequence(Report):
    """The result of :func:`rmm_linear.max_length`. Lengths are in tokens of one sequence.

    Attributes:
        length: With the plan; 0 if nothing fits.
        exact: Of the exact model.
        checkpointed: With every block recomputed in the backward pass.
        batch_size: Sequences of a batch.
        plan: The plan for ``length``; ``plan.apply()`` makes the model train by it. None if nothing fits.
        peak: Bytes of a training process with the plan and that length, simulated.
        memory: The budget in bytes.
        bytes_per_token: Bytes that one more token of the batch adds to the peak.
        host_bytes: Bytes that wait in the memory of the host, or in files, and what ``shards`` puts there.
        binds: What keeps sequences from being longer: the memory of the device or of the host, or the link between
            them, with the moment of the peak; "positions", or "nothing"; where nothing fits, "optimizer step" or
            "shortest sequence".
        notes: Options that were left out, with the reason.
    """

    length: int
    exact: int
    checkpointed: int
    batch_size: int
    plan: BlockPlan | None
    peak: int
    memory: int
    bytes_per_token: float = 0.0
    host_bytes: int = 0
    binds: str = ""
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of a batch of the longest sequences."""
        return self.length * self.batch_size

    def summary(self) -> str:
        """Return the result in one line, or two of 100 columns."""
        sizes = (f"length={self.length}", f"exact={self.exact}", f"checkpointed={self.checkpointed}")
        return keyed("rmm_linear max_length:", (*sizes, f"budget={show_both(self.memory)}"))

    def _text(self, *, is_whole: bool) -> str:
        plan = self.plan.table() if is_whole and self.plan is not None else ""
        rows = [(str(one["method"]), f"{one['tokens']:,}") for one in self._records()]
        peaks = f"{show_bytes(self.peak)} on the device, {show_bytes(self.host_bytes)} on the host"
        said = [
            f"Peak with {self.batch_size} such: {peaks}.",
            f"A token adds {show_both(round(self.bytes_per_token))}.",
            f"What binds: {self.binds}.",
        ]
        parts = [self.summary(), table(("longest sequence", "tokens"), rows), "\n".join(wrapped(s, 2) for s in said)]
        return "\n\n".join(filter(None, [*parts, "\n".join(wrapped(f"Note: {note}", 2) for note in self.notes), plan]))

    def _records(self) -> list[dict[str, Any]]:
        found = {"exact": self.exact, "every block recomputed": self.checkpointed, "fitted": self.length}
        return [{"method": name, "tokens": count} for name, count in found.items()]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON types.

        Returns:
            Its figures, and the plan.
        """
        names = ("length", "tokens", "batch_size", "exact", "checkpointed", "bytes_per_token", "binds", "host_bytes")
        return {
            **{name: getattr(self, name) for name in (*names, "peak", "memory")},
            "notes": [*self.notes],
            "plan": None if self.plan is None else self.plan.to_dict(),
        }


def max_length(
    model: nn.Module,
    example: Any,
    memory: int | str,
    *,
    batch_size: int = 1,
    optimizer: Any = None,
    max_noise: float = 1.0,
    allow: Collection[str] = ALLOW,
    folder: str | None = None,
    host_memory: int | str | None = None,
    bandwidth: float | str | None = None,
    shards: Shards | None = None,
    checkpointing: str = REPLACE,
    multiple: int = 64,
    progress: bool | None = None,
) -> LongestSequence:
    """Find the longest sequence that fits into memory with a plan, and compare it with what fits without one.

    Bytes of every option are measured for two lengths, and extrapolated along a line. A plan is solved with them, and
    simulated with sequences of that length. A length is within half a percent, or ``multiple``, of the longest. The
    model stays as it is. On the meta device, a million tokens take as long as a thousand, about thirty simulated steps;
    a model with weights runs real steps for plans with compressed activations.

    Args:
        model: The model, neither converted nor planned.
        example: A training batch with tensors (B, T), such as token ids, or embeddings (B, T, H): a mapping, a sequence
            of tensors, or a tensor. Its tokens are repeated for longer sequences. Leave out an attention mask of ones
            that is on the meta device: it stands for any mask.
        memory: Budget, as for :func:`rmm_linear.fit`, but no share.
        batch_size: Sequences of a batch.
        optimizer: As for :func:`rmm_linear.fit`.
        max_noise: As for :func:`rmm_linear.fit`; noise is that of ``example``.
        allow: As for :func:`rmm_linear.fit`.
        folder: As for :func:`rmm_linear.fit`.
        host_memory: As for :func:`rmm_linear.fit`.
        bandwidth: As for :func:`rmm_linear.fit`.
        shards: As for :func:`rmm_linear.fit`; the batch is that of one rank, or of all that share a sequence, whose
            whole length counts.
        checkpointing: As for :func:`rmm_linear.fit`.
        multiple: Lengths are multiples of it, and of twice the number of ranks that share a sequence.
        progress: As for :func:`rmm_linear.fit`.

    Returns:
        The lengths, the plan, and what binds: with a table of absolute positions, such as RoBERTa's of 512, these may.

    Raises:
        ValueError: If an argument is out of range, or the example has no sequence, or what cannot follow it: images,
            several texts in a row, a function.
        TypeError: If ``memory`` is a share.

    Example:
        >>> import torch
        >>> layers = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)]
        >>> found = max_length(nn.Sequential(*layers), torch.randn(1, 64, 64), "4MB", multiple=8)
        >>> found.exact < found.checkpointed <= found.length
        True
    """
    check_size(memory)
    check_arguments(
        model, memory, allow, max_noise=max_noise, checkpointing=checkpointing, example=example, shards=shards
    )
    check_integer("batch_size", batch_size)
    check_integer("multiple", multiple)
    context = 1 if shards is None else shards.context
    multiple = lcm(multiple, 2 * context) if context > 1 else multiple
    positions = usable_positions(model)
    most = MOST if positions is None else positions // multiple
    if most < 2:
        raise ValueError(f"multiple must be at most half of the model's {positions} positions, got {multiple}.")
    with reporting("max_length", progress), uncheckpointed(model, checkpointing), quiet(), divided(model, shards):
        batch, tokens = resized(example, batch_size), length_of(example)
        if not has_memory(model):
            first = min(_FIRST, most * multiple // context)
            peak = watch(model, lengthened(batch, first))[0].bytes
            tokens = max(first, _SHARE * read_bytes("memory", memory) * first // peak // _FIRST * _FIRST) * context
        large = min(max(tokens // multiple, 2), most)
        part = multiple // context  # of a rank
        sizes = Sizes(lambda count: lengthened(batch, count * part), large // 2, large, most, _TOLERANCE)
        work = Fitting(
            model, sizes.batch(large), memory, optimizer=optimizer, allow=allow, folder=folder,
            host_memory=host_memory, bandwidth=bandwidth, shards=shards, checkpointing=checkpointing,
        )  # fmt: skip
        search = SizeSearch(work, sizes)
        found = search.find(max_noise, example)
        slope = search.slope(found) / (multiple * batch_size)
    if found.plan is None:
        binds = "shortest sequence" if work.is_within(0) else "optimizer step"
    elif found.size == most:
        binds = "nothing" if positions is None else "positions"
    else:
        binds = f"{work.binds(found.plan) or 'the device memory'}, in the {_moment(found.plan, work.proposals.names)}"
    trained = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    notes = found.notes
    if positions is None and isinstance(trained, int) and found.size * multiple > trained:
        notes = (*notes, f"The model's configuration has {trained:,} positions; longer sequences need other settings.")
    return LongestSequence(
        length=found.size * multiple,
        exact=found.exact * multiple,
        checkpointed=found.checkpointed * multiple,
        batch_size=batch_size,
        plan=found.plan,
        peak=found.peak,
        memory=work.total or 0,
        bytes_per_token=slope,
        host_bytes=work.static.host + (0 if found.plan is None else found.plan.host),
        binds=binds,
        notes=notes,
    )


def _moment(plan: BlockPlan, blocks: Sequence[str]) -> str:
    """Return the moment of the peak, by its block."""
    what, _, name = plan.moment.rpartition(" ")
    return f"{what} {owner_of(name, blocks) or name}"
