"""The largest batch that fits into memory: exact, with every block recomputed, and with a plan."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rmm_linear._support.quiet import quiet
from rmm_linear._support.sizes import show_bytes
from rmm_linear._support.tables import table
from rmm_linear.fitting.fit import check_arguments
from rmm_linear.fitting.fitting import Fitting
from rmm_linear.fitting.options import ALLOW
from rmm_linear.fitting.shards import Shards
from rmm_linear.memory.inputs import sequences_in
from rmm_linear.planning.blocks.measure import Costs, measure
from rmm_linear.planning.blocks.plan import KEEP, RECOMPUTE, BlockPlan, PlannedBlock
from rmm_linear.planning.blocks.proposals import Proposals
from rmm_linear.planning.blocks.solve import Option, choose, least
from rmm_linear.planning.budget import LEAST
from rmm_linear.planning.step.watch import watch

_MOST = 2**24  # sequences; more is taken for "any number"
_TRIES = 8


@dataclass(frozen=True)
class LargestBatch:
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

    def __str__(self) -> str:
        rows = [
            ("exact", str(self.exact)),
            ("every block recomputed", str(self.checkpointed)),
            ("fitted", str(self.batch)),
        ]
        lines = [
            f"rmm_linear max_batch: batch={self.batch} exact={self.exact} checkpointed={self.checkpointed} "
            f"peak={show_bytes(self.peak)} budget={show_bytes(self.memory)}",
            table(("largest batch", "sequences"), rows),
            *(f"Note: {note}" for note in self.notes),
        ]
        return "\n\n".join(lines)


def max_batch(
    model: nn.Module,
    example: Any,
    memory: int | str,
    *,
    optimizer: Any = None,
    max_noise: float = 1.0,
    allow: Collection[str] = ALLOW,
    folder: str | None = None,
    shards: Shards | None = None,
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
        shards: As for :func:`rmm_linear.fit`; the batch is that of one rank.

    Returns:
        The sizes, and the plan.

    Raises:
        ValueError: If an argument is out of range, or the example is a function, of which no larger batch can be made.
        TypeError: If ``memory`` is a share.

    Example:
        >>> layers = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)]
        >>> found = max_batch(nn.Sequential(*layers), torch.randn(64, 64), "4MB")
        >>> found.exact < found.checkpointed <= found.batch
        True
    """
    if memory is None or isinstance(memory, float) or memory == LEAST:
        raise TypeError(
            f'memory must be bytes or a text such as "8GB", got {memory!r}. A share has no meaning here, nor "least".'
        )
    check_arguments(model, memory, allow, max_noise=max_noise)
    with quiet():
        count = _sequences(example)
        size = 2 if count == 1 else count
        small, large = resized(example, size // 2), resized(example, size)
        work = Fitting(model, large, memory, optimizer=optimizer, allow=allow, folder=folder, shards=shards)
        budget = work.proposals.budget

        def simulated(plan: BlockPlan, count: int) -> int:
            try:
                with plan.applied() as planned:
                    return watch(planned, resized(example, count), held=work.proposals.held)[0].bytes
            except torch.OutOfMemoryError:
                return budget + 1

        plain = work.proposals.plan_of([rows[0] for rows in work.proposals.rows])
        again = BlockPlan(
            [PlannedBlock(one.name, KEEP if one.writes_input else RECOMPUTE) for one in work.costs.blocks]
        ).made_for(model)
        if not work.is_within(0):
            floor = work.static.in_optimizer_step
            note = f"{show_bytes(floor)} are needed before anything is saved for a backward pass."
            return LargestBatch(0, 0, 0, None, floor, work.total or 0, (note,))
        exact = _largest(partial(simulated, plain), budget, count)
        try:
            checkpointed = _largest(partial(simulated, again), budget, max(exact, 1))
        except RuntimeError as error:
            checkpointed = 0
            work.candidates.notes.append(f"Not every block can be recomputed. {error}")
        work.add_options(max_noise, example)  # of which `large` may be two copies, whose gradients are alike
        lines = _Lines(work.proposals, _measured_at(small, work.proposals), size // 2, size)
        plans: dict[int, BlockPlan] = {}

        def fitted(count: int) -> int:
            try:
                plans[count] = lines.plan(work, example, count)
            except torch.OutOfMemoryError:
                return budget + 1
            return plans[count].predicted

        found = _largest(fitted, budget, lines.solvable(budget), tries=_TRIES)
        plan = plans.get(found)
        for known, other, option in ((checkpointed, again, RECOMPUTE), (exact, plain, KEEP)):
            if known > found and option in work.allow:
                found, plan = known, other
        peak = 0 if plan is None else simulated(plan, found)
    return LargestBatch(
        found, exact, checkpointed, plan, work.before + peak, work.total or 0, tuple(work.candidates.notes)
    )


def resized(example: Any, count: int) -> Any:
    """Make a batch of another number of sequences, by repeating those that are there.

    Tensors whose first dimension is the most frequent one, or the first of such, get that many rows; others stay.
    """
    have = _sequences(example)

    def resize(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != have:
            return tensor
        return tensor[torch.arange(count, device=tensor.device) % have]

    return tree_map_only(Tensor, resize, example)


def _sequences(example: Any) -> int:
    if callable(example):
        raise ValueError(
            "max_batch makes batches of other sizes, which a function as the example does not allow. Pass the batch: "
            "a mapping, a sequence of tensors, or a tensor."
        )
    count = sequences_in(example)
    if not count:
        raise ValueError(
            f"max_batch needs a batch with tensors of one row or more, got {type(example).__name__} without any. Pass "
            "a training batch."
        )
    return count


def _largest(measure_bytes: Callable[[int], int], budget: int, guess: int, tries: int = 30) -> int:
    # Bytes grow by a line, nearly, so a secant finds the largest number. With few tries it may not be the largest, but
    # what is returned was tried and is within the budget.
    sizes: dict[int, int] = {}
    low, high = 0, None  # the largest that fits, the smallest that does not
    for _ in range(tries):
        if (high is not None and high - low <= 1) or low >= _MOST:
            break
        sizes[guess] = measure_bytes(guess)
        low, high = (guess, high) if sizes[guess] <= budget else (low, guess)
        guess = _next(sizes, budget, low, high)
    return low


def _next(sizes: dict[int, int], budget: int, low: int, high: int | None) -> int:
    """Return the size to try next: where the line through the last two meets the budget, between what is known."""
    if len(sizes) < 2:
        return max(1, low * 2) if high is None else max(1, high // 2)
    (x0, y0), (x1, y1) = list(sizes.items())[-2:]
    slope = (y1 - y0) / (x1 - x0)
    guess = int(x1 + (budget - y1) / slope) if slope > 0 else (low * 2 if high is None else (low + high) // 2)
    return max(low + 1, guess if high is None else min(guess, high - 1))


def _measured_at(example: Any, proposals: Proposals) -> Proposals:
    """Return the same options with another batch."""
    blocks = measure(proposals.model, example, held=proposals.held).blocks
    found = replace(proposals, example=example, costs=Costs(blocks, proposals.costs.peak), rows=())
    names = dict.fromkeys(row.option for rows in proposals.rows for row in rows if row.choice != KEEP)
    for name in names:
        found = found.adding([next((row for row in rows if row.option == name), None) for rows in proposals.rows])
    return found


class _Lines:
    """Bytes of every option as lines through those for two sizes of the batch."""

    def __init__(self, proposals: Proposals, smaller: Proposals, low: int, high: int) -> None:
        self.proposals, self.low, self.high = proposals, low, high
        self.smaller = [{row.option: row for row in rows} for rows in smaller.rows]

    def rows(self, count: int) -> list[list[PlannedBlock]]:
        """Return the options for a number of sequences."""
        part = (count - self.low) / (self.high - self.low)

        def at(low: int, high: int) -> int:
            return max(0, round(low + part * (high - low)))

        return [
            [
                replace(row, kept=at(less[row.option].kept, row.kept), worst=at(less[row.option].worst, row.worst))
                for row in rows
            ]
            for rows, less in zip(self.proposals.rows, self.smaller, strict=True)
        ]

    def plan(self, work: Fitting, example: Any, count: int) -> BlockPlan:
        """Return the plan of least memory for a number of sequences, simulated with as many."""
        proposals = replace(work.proposals, example=resized(example, count), rows=self.rows(count))
        options = proposals.options
        return proposals.judge(choose(options, least(options), work.cost, solver="rounded") or [])

    def solvable(self, budget: int) -> int:
        """Return the largest number of sequences for which the lines promise a plan."""
        low, high = 1, 2

        def fits(count: int) -> bool:
            blocks = self.rows(count)
            return least([[Option(row.option, row.kept, row.worst, 0.0) for row in rows] for rows in blocks]) <= budget

        while high < _MOST and fits(high):
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low
