"""Measure the memory, operations and time that every block of a model costs in a training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from rmm_linear._support.progress import end_stage, expect, stage, took
from rmm_linear._support.reports import Report
from rmm_linear._support.sizes import show_bytes
from rmm_linear._support.tables import grouped, keyed, named_table
from rmm_linear.memory.peak import Peak
from rmm_linear.planning.blocks.find import find_blocks, owner_of
from rmm_linear.planning.blocks.observe import observe
from rmm_linear.planning.blocks.timing import time_modules
from rmm_linear.planning.budget import check_model
from rmm_linear.planning.graphs.node_costs import NodeCost, measure_nodes
from rmm_linear.planning.step.follow import FORWARD, Event
from rmm_linear.planning.step.sharded import runs_alone
from rmm_linear.planning.step.watch import SIMULATING, Held, watch
from rmm_linear.planning.step.workspace import Workspace
from rmm_linear.planning.step.workspace import workspace as measure_workspace

TIMING = "timing forward passes"  # a stage by whose seconds, and SIMULATING's, those of other steps are estimated
_FORWARDS, _STEP = 2, 3.0  # passes; of a forward pass


@dataclass(frozen=True)
class BlockCost:
    """A block in one training step.

    Attributes:
        name: The block.
        kept: Bytes that remain after its forward pass and were not there before.
        worst: Peak in bytes of its own forward, recomputation or backward pass, without what the blocks before it save.
        storages: Bytes of the storages that it is the first to save, largest first.
        flops: Operations of its forward pass.
        seconds: Time of its forward pass; like blocks have the same. 0 for a model on the meta device.
        random: Whether it draws random numbers.
        writes_input: Whether a tensor that it was given is changed in place, so that it cannot be recomputed.
        attention: Of its operations, those of fused attention.
    """

    name: str
    kept: int
    worst: int
    storages: tuple[int, ...]
    flops: int
    seconds: float
    random: bool
    writes_input: bool
    attention: int = 0

    @property
    def transient(self) -> int:
        """Bytes that its peak adds to what it saves."""
        return max(0, self.worst - self.kept)


@dataclass(frozen=True, repr=False)
class Costs(Report):
    """The blocks of a model in one training step.

    Attributes:
        blocks: In the order of the forward pass.
        peak: Of the whole step.
        nodes: The nodes of its graph, if they were asked for.
        workspace: Bytes that operators take beyond their results, if that was asked for.
        has_loss: Whether the model returns a loss; otherwise the sum of its outputs was differentiated.
    """

    blocks: tuple[BlockCost, ...]
    peak: Peak
    nodes: tuple[NodeCost, ...] = ()
    workspace: Workspace | None = None
    has_loss: bool = True

    def summary(self) -> str:
        """Return the peak of the step in one line, or two of 100 columns."""
        blocks = f"blocks={len(self.blocks)}"
        return keyed("rmm_linear measure:", (blocks, f"peak={show_bytes(self.peak.bytes)}", self.peak.moment))

    def __str__(self) -> str:
        return self._text(is_whole=False)

    def table(self) -> str:
        """Return a row for every block, and one for every node where they were measured.

        Returns:
            Text.
        """
        return "\n\n".join([self._text(is_whole=True), *([self.node_table()] if self.nodes else [])])

    def _text(self, *, is_whole: bool) -> str:
        rows = [
            (
                block.name,
                show_bytes(block.kept),
                show_bytes(sum(block.storages)),
                show_bytes(block.transient),
                f"{block.flops / 1e9:.3g}",
                f"{block.seconds:.2g}",
                *_flags(block.random, block.writes_input),
            )
            for block in self.blocks
        ]
        rows = rows if is_whole else [(pattern, *cells) for pattern, _, cells in grouped(rows)]
        header = ("block", "remains", "saved first", "transient", "GFLOP", "seconds", "random", "in place")
        return f"{self.summary()}\n{named_table(header, rows)}\nEach figure is of one block."

    def node_table(self) -> str:
        """Return a row per node of the graph."""
        rows = [
            (
                node.name,
                node.module,
                show_bytes(sum(node.storages)),
                show_bytes(node.transient),
                f"{node.flops / 1e9:.3g}",
                f"{node.seconds:.2g}",
                *_flags(node.random, node.writes),
            )
            for node in self.nodes
        ]
        return named_table(("node", "module", "saved", "transient", "GFLOP", "seconds", "random", "in place"), rows)

    def _records(self) -> list[dict[str, Any]]:
        return [{**vars(block), "storages": sum(block.storages)} for block in self.blocks]


def _flags(*flags: bool) -> list[str]:
    return ["yes" if flag else "" for flag in flags]


def measure(
    model: nn.Module, example: Any, *, nodes: bool = False, workspace: bool = False, held: Held | None = None
) -> Costs:
    """Measure what every block of a model costs in a training step.

    Memory and operations come from a step on fake tensors, see :func:`rmm_linear.planning.simulate`; time from forward
    passes on the real ones that save nothing.

    Args:
        model: The model.
        example: A training batch, as for :func:`rmm_linear.planning.simulate`.
        nodes: Whether the nodes of the model's graph are measured too, which must be a single one.
        workspace: Whether a whole step runs on the real tensors, under the profiler, to see what operators take beyond
            their results; see :func:`rmm_linear.planning.workspace`.
        held: Says how many bytes of a parameter's gradient count once it is added up; None: all.

    Returns:
        A row per block.

    Raises:
        ValueError: If the model calls no module of its own, or if nodes are asked for and it is no single graph.

    Example:
        >>> import torch
        >>> costs = measure(nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 1)), torch.ones(5, 10))
        >>> [sum(block.storages) for block in costs.blocks]  # the batch, the activation
        [200, 2000, 0]
    """
    check_model(model)
    names = find_blocks(model)
    stage("looking at the blocks")
    seen, has_loss = observe(model, example, names)
    # What a module saves cannot be told apart from what others save between its calls.
    blocks = [name for name, block in seen.items() if not block.returns]
    if not blocks:
        raise ValueError(
            "A model is measured block by block, but none of its modules is called by itself, and once, got "
            f"{type(model).__name__}. Put it into a module that calls it, nn.Sequential(model)."
        )
    stage(SIMULATING)
    peak, live = watch(model, example, held=held)
    random = {owner_of(name, blocks) for name in live.random}
    kept, worst = by_block(live.events, blocks)
    end_stage()
    seconds = dict.fromkeys(blocks, 0.0)
    if runs_alone(model):
        stage(TIMING)
        seconds = time_modules(model, example, blocks)
    end_stage()
    return Costs(
        tuple(
            BlockCost(
                name,
                kept[name],
                worst[name],
                tuple(seen[name].storages),
                seen[name].flops,
                seconds[name],
                name in random,
                seen[name].writes_input,
                seen[name].attention,
            )
            for name in blocks
        ),
        peak,
        measure_nodes(model, example) if nodes else (),
        measure_workspace(model, example) if workspace else None,
        has_loss,
    )


def step_seconds() -> float:
    """Return about how long a real step takes; 0 for a model without weights, or where nobody asks."""
    return _STEP * (took(TIMING) or 0.0) / _FORWARDS


def expect_steps(simulated: float, real: float) -> None:
    """Say how long a call takes that has measured a model, by the steps that will be simulated, and real ones."""
    each = took(SIMULATING)
    if each is not None and not (step := step_seconds()):
        expect(simulated, simulated * each, of="simulated steps")
    elif each is not None:
        seconds = simulated * each + real * step
        expect(seconds / step, seconds)


def by_block(events: Sequence[Event], blocks: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Divide the live bytes of a step among blocks: what remains after the forward pass, and the peak."""
    kept, forward, backward = by_pass(events, blocks)
    return kept, {name: max(forward[name], backward[name]) for name in blocks}


def by_pass(events: Sequence[Event], blocks: Sequence[str]) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Do the same with the peaks of the forward pass, and those of the passes after it, by themselves."""
    after: dict[str, int] = {}
    highest = {True: dict.fromkeys(blocks, 0), False: dict.fromkeys(blocks, 0)}
    current, owners = blocks[0], dict[str, str | None]()
    for event in events:
        if event.running not in owners:
            owners[event.running] = owner_of(event.running, blocks)
        owner = owners[event.running]
        if owner is not None:
            current = owner
        is_forward = event.pass_ == FORWARD
        if is_forward:
            after[current] = event.now
        highest[is_forward][current] = max(highest[is_forward][current], event.now)
    kept: dict[str, int] = {}
    before = 0
    for name in blocks:
        for found in highest.values():
            found[name] -= before
        kept[name] = max(0, after.get(name, before) - before)
        before += kept[name]
    return kept, highest[True], highest[False]
