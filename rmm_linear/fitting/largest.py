"""The largest batch that fits into memory: exact, with every block recomputed, and with a plan."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from rmm_linear._support.progress import reporting
from rmm_linear._support.quiet import quiet
from rmm_linear._support.reports import Report
from rmm_linear._support.sizes import show_both, show_bytes
from rmm_linear._support.tables import keyed, table, wrapped
from rmm_linear.context.checkpointing import REPLACE, uncheckpointed
from rmm_linear.fitting.fit import check_arguments
from rmm_linear.fitting.fitting import Fitting
from rmm_linear.fitting.options import ALLOW
from rmm_linear.fitting.search import Sizes, SizeSearch, check_size
from rmm_linear.planning.blocks.plan import BlockPlan
from rmm_linear.planning.step.divided import divided, part_of
from rmm_linear.planning.step.resize import resized, sequences_of
from rmm_linear.planning.step.shards import Shards


@dataclass(frozen=True, repr=False)
class LargestBatch(Report):
    """The result of :func:`rmm_linear.max_batch`, in sequences: the length of the batch's first dimension.

    Attributes:
        batch: With the plan; 0 if not even one fits.
        exact: Of the exact model.
        checkpointed: With every block recomputed in the backward pass.
        plan: The plan for ``batch``; ``plan.apply()`` makes the model train by it. None if nothing fits.
        peak: Bytes of a training process with the plan and that batch, simulated.
        memory: The budget in bytes.
        notes: Options that were left out, with the reason.
    """

    batch: int
    exact: int
    checkpointed: int
    plan: BlockPlan | None
    peak: int
    memory: int
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return the result in one line, or two of 100 columns."""
        sizes = (f"batch={self.batch}", f"exact={self.exact}", f"checkpointed={self.checkpointed}")
        bytes_ = (f"peak={show_bytes(self.peak)}", f"budget={show_both(self.memory)}")
        return keyed("rmm_linear max_batch:", (*sizes, *bytes_))

    def _text(self, *, is_whole: bool) -> str:
        plan = self.plan.table() if is_whole and self.plan is not None else ""
        rows = [(str(one["method"]), f"{one['sequences']:,}") for one in self._records()]
        notes = "\n".join(wrapped(f"Note: {note}", 2) for note in self.notes)
        return "\n\n".join(filter(None, [self.summary(), table(("largest batch", "sequences"), rows), notes, plan]))

    def _records(self) -> list[dict[str, Any]]:
        found = {"exact": self.exact, "every block recomputed": self.checkpointed, "fitted": self.batch}
        return [{"method": name, "sequences": count} for name, count in found.items()]


def max_batch(
    model: nn.Module,
    example: Any,
    memory: int | str,
    *,
    optimizer: Any = None,
    max_noise: float = 1.0,
    allow: Collection[str] = ALLOW,
    folder: str | None = None,
    host_memory: int | str | None = None,
    bandwidth: float | str | None = None,
    shards: Shards | None = None,
    checkpointing: str = REPLACE,
    progress: bool | None = None,
) -> LargestBatch:
    """Find the largest batch that fits into memory with a plan, and compare it with what fits without one.

    Bytes of every option are measured for two sizes of the batch, and extrapolated along a line. A plan is solved with
    them, and simulated with a batch of that size. The model stays as it is.

    Args:
        model: The model, neither converted nor planned.
        example: A training batch of one sequence or more: a mapping, a sequence of tensors, or a tensor. Its rows are
            repeated for larger batches.
        memory: Budget, as for :func:`rmm_linear.fit`, but no share.
        optimizer: As for :func:`rmm_linear.fit`.
        max_noise: As for :func:`rmm_linear.fit`; noise is that of ``example``.
        allow: As for :func:`rmm_linear.fit`.
        folder: As for :func:`rmm_linear.fit`.
        host_memory: As for :func:`rmm_linear.fit`.
        bandwidth: As for :func:`rmm_linear.fit`.
        shards: As for :func:`rmm_linear.fit`; the batch is that of one rank, or of all that share a sequence.
        checkpointing: As for :func:`rmm_linear.fit`.
        progress: As for :func:`rmm_linear.fit`.

    Returns:
        The sizes, and the plan.

    Raises:
        ValueError: If an argument is out of range, or the example is a function, of which no larger batch can be made.
        TypeError: If ``memory`` is a share.

    Example:
        >>> import torch
        >>> layers = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)]
        >>> found = max_batch(nn.Sequential(*layers), torch.randn(64, 64), "4MB")
        >>> found.exact < found.checkpointed <= found.batch
        True
    """
    check_size(memory)
    check_arguments(
        model, memory, allow, max_noise=max_noise, checkpointing=checkpointing, example=example, shards=shards
    )
    with reporting("max_batch", progress), uncheckpointed(model, checkpointing), quiet(), divided(model, shards):
        example = part_of(example, shards)
        count = max(sequences_of(example), 2)
        sizes = Sizes(partial(resized, example), count // 2, count)
        work = Fitting(
            model, sizes.batch(count), memory, optimizer=optimizer, allow=allow, folder=folder,
            host_memory=host_memory, bandwidth=bandwidth, shards=shards, checkpointing=checkpointing,
        )  # fmt: skip
        # The batch may be two copies of a sequence, whose gradients are alike: noise is that of the example.
        found = SizeSearch(work, sizes).find(max_noise, example)
    return LargestBatch(
        found.size, found.exact, found.checkpointed, found.plan, found.peak, work.total or 0, found.notes
    )
