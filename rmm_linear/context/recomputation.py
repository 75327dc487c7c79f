"""Masks and ids for recomputed layers: remember those of every forward pass until its backward pass is over.

Activation checkpointing recomputes layers inside of the backward pass, without the modules around them, so the mask and
ids of the original call must be remembered. The forward pass is found by the autograd node that is running
(:mod:`rmm_linear.context.surroundings`), whatever the order of forward and backward passes. If it is not found, the
layer is recomputed without a mask: that adds noise, whereas the mask of another pass would bias the gradient. So it
is where several threads have run forward passes at once: PyTorch numbers the nodes of every thread by itself.

A recomputation takes the seeds of its forward pass again, and so makes the same sketches.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from rmm_linear.context.call_inputs import AttentionMask, CallInputs
from rmm_linear.context.left_out import LeftOut
from rmm_linear.context.ranks import Ranks
from rmm_linear.context.surroundings import next_node, running_node
from rmm_linear.context.survey import Survey
from rmm_linear.sketches import TokenMask
from rmm_linear.sketches.seeds import draw_seed, mix, peek_seed

_MOST = 64  # forward passes that are remembered
_PASSES = "rmm_linear"  # in what is known of a node, next to what anomaly detection notes there


@dataclass(eq=False)
class StepSeeds:
    """The seeds of the layers' calls in one forward pass: that of the step xor a number of the layer and the call."""

    ranks: Ranks | None = None  # those that some layers draw alike with; None where every rank draws its own numbers
    step: int | None = None
    taken: dict[int, int] = field(default_factory=dict)  # by the layer's index, its calls that have taken a seed
    repeated: dict[int, int] = field(default_factory=dict)  # the same of calls in recomputations

    def take(self, index: int, salt: int) -> int:
        """Return the seed of a layer's next call; ``salt`` makes others of the same state of the generator."""
        if self.step is None:
            leader = None if self.ranks is None else self.ranks.leader
            self.step = peek_seed(leader) ^ (mix(salt) if salt else 0)
        call = self.taken[index] = self.taken.get(index, -1) + 1
        return self._seed(self.step, index, call)

    def repeat(self, index: int) -> int:
        """Return the seed that a call had: of the calls of one layer, it is unknown which one is recomputed first."""
        if self.step is None:
            return draw_seed()
        call = self.repeated[index] = self.repeated.get(index, -1) + 1
        return self._seed(self.step, index, call % (self.taken.get(index, 0) + 1))

    def _seed(self, step: int, index: int, call: int) -> int:
        found = step ^ _number_of(index, call)
        return found if self.ranks is None else found ^ self.ranks.own_part(index)


@functools.lru_cache(maxsize=1 << 16)
def _number_of(index: int, call: int) -> int:
    return mix(index, call)


@dataclass(eq=False)
class ForwardPass:
    """The masks, ids and sample indices of the layers' calls in one forward pass."""

    module: nn.Module
    pending: PendingForwards
    seeds: StepSeeds
    begin: int  # number of its first autograd node
    end: int | None = None  # number of the first node after it, or None while the pass is running
    # By the layer's index: N, the mask, the ids and the sample indices of its calls
    calls: dict[int, set[tuple[int, AttentionMask | None, Tensor | None, Tensor | None]]] = field(default_factory=dict)
    # The index of a module that looks for a gradient in its padding, as the first to run backward does; None: all look
    turn: int | None = -1
    seen: int = -1  # the backward pass in which the first one has
    backward_begun: bool = False  # whether its backward pass has begun
    is_dropped: bool = False  # whether calls with a mask were dropped, because its backward pass is over

    def note_backward(self, y: Tensor | None = None, mask: TokenMask | None = None) -> None:
        """Note that the backward pass has begun; ``y`` is the gradient of a module's output, shape (N, O)."""
        self.backward_begun = self.pending.backward_seen = True
        if y is not None and mask is not None and self.seen != torch._C._current_graph_task_id():
            self.look_at_padding(y, mask, "a layer next to the loss", -2)

    def is_in_turn(self, index: int) -> bool:
        return self.turn is None or self.turn == index

    def look_at_padding(self, y: Tensor, mask: TokenMask, name: str, index: int) -> None:
        """Look at the gradient of a module's output, if it is the first one or its turn."""
        task = torch._C._current_graph_task_id()
        is_first, self.seen = self.seen != task, task
        if is_first or self.is_in_turn(index):
            self.pending.left_out.note_padding(y, mask, name, is_first=is_first)

    def created(self, node: int) -> bool:
        return self.begin <= node and (self.end is None or node < self.end)

    def overlaps(self, other: ForwardPass) -> bool:
        """Say whether some nodes' numbers are those of another pass too, which another thread has counted."""
        if other is self:
            return False
        return (other.end is None or self.begin < other.end) and (self.end is None or other.begin < self.end)

    def find(self, index: int, tokens: int, name: str, masked: bool) -> CallInputs:
        """Return the mask, ids and sample indices of the call that is being recomputed.

        A layer may be called several times in a pass. Another call's mask would bias the gradient; ids and sample
        indices only affect its noise, and are left out where the calls differ.
        """
        if self.is_dropped and masked:
            raise RuntimeError(
                f"Activation checkpointing recomputes {name} a second time, and the attention masks of its forward "
                "pass were dropped when another forward pass began after its backward pass. Run all backward passes "
                "of a forward pass before the next one, or convert with mask_padding=False."
            )
        fitting = [call[1:] for call in self.calls.get(index, ()) if call[0] == tokens]
        if not fitting:
            return CallInputs()
        mask, ids, indices = fitting[0]
        if masked and any(not _same(other, mask) for other, _, _ in fitting):
            raise RuntimeError(
                f"Activation checkpointing recomputes {name}, which was called several times in one forward pass, "
                "with different attention masks: it is unknown which call is recomputed. Call it in separate "
                "forward passes, or convert with mask_padding=False."
            )
        ids = ids if all(other is ids for _, other, _ in fitting) else None
        indices = indices if all(other is indices for _, _, other in fitting) else None
        return CallInputs(mask, ids, indices)


class _OfThread(threading.local):
    """The pass that a thread runs, and the last one, if no tensor of its output has a graph."""

    open: ForwardPass | None = None
    last: ForwardPass | None = None


class PendingForwards:
    """The forward passes of a model whose layers may still be recomputed."""

    def __init__(self) -> None:
        self.backward_seen = False  # whether a backward pass has begun since this was set to False
        self.left_out = LeftOut()
        # The nodes of the outputs, and those of the layers, hold the passes, so that masks are freed with the graph.
        self._known: deque[weakref.ref[ForwardPass]] = deque(maxlen=_MOST)
        self._held: deque[ForwardPass] = deque(maxlen=_MOST)  # of outputs in which no tensor was found
        self._own = _OfThread()
        # The backward pass alone holds the values: one that fails runs no callback, but releases its own.
        self._tasks: weakref.WeakValueDictionary[int, _Running] = weakref.WeakValueDictionary()

    def passes(self) -> list[ForwardPass]:
        """Return the forward passes whose graphs are alive, the oldest first."""
        return [known for reference in self._known if (known := reference()) is not None]

    def open(self, module: nn.Module, seeds: StepSeeds, turn: int | None = -1) -> None:
        """Begin a forward pass, and drop the calls of those whose backward pass is over."""
        self._own.open = self._own.last = None  # an interrupted pass, and one that nothing holds
        self._tasks.clear()
        for known in self.passes():
            if known.backward_begun and known.calls:
                known.is_dropped = any(mask is not None for calls in known.calls.values() for _, mask, _, _ in calls)
                known.calls.clear()
        self._own.open = ForwardPass(module, self, seeds, next_node(), turn=turn)
        self._known = deque(map(weakref.ref, [*self.passes(), self._own.open]), _MOST)

    def close(self, output: Any) -> None:
        """End the forward pass; one without gradients has no backward pass, and is not remembered."""
        closed, self._own.open = self._own.open, None
        if closed is None or not torch.is_grad_enabled():
            return
        closed.end = next_node()
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        # An operation in place gives a view another node; that of the tensor that it is a view of stays.
        found = {one.grad_fn for leaf in tensors for one in (leaf, leaf._base) if one is not None}
        own = [node for node in found if node is not None and node._sequence_nr() >= closed.begin]  # pyright: ignore
        for node in own:
            notes: Any = node.metadata
            notes.setdefault(_PASSES, []).append(closed)
        if not tensors and output is not None:
            self._held.append(closed)
        self._own.last = None if own else closed

    @property
    def current(self) -> ForwardPass | None:
        """The pass that is running, for the node of a layer to hold."""
        return self._own.open

    def add(self, index: int, tokens: int, inputs: CallInputs) -> None:
        """Remember the mask and ids of a call, of N tokens, in the current forward pass, if there is one."""
        if self._own.open is not None:
            calls = self._own.open.calls.setdefault(index, set())
            calls.add((tokens, inputs.mask, inputs.input_ids, inputs.sample_index))

    def find(self) -> ForwardPass | None:
        """Return the forward pass whose backward pass is running; None if it is not one of the model's, or too old."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return None
        if self._tasks and task not in self._tasks:
            # A backward pass inside of a recomputation, which created the node that is running.
            return list(self._tasks.values())[-1].known
        node, running = running_node(), self._tasks.get(task)
        if running is not None and running.is_alone and node is not None and running.known.created(node):
            return running.known  # as in all but the first layer: the remembered passes are many
        passes = self.passes()
        fitting = [] if node is None else [each for each in passes if each.created(node)]
        if len(fitting) != 1:  # every thread numbers its nodes by itself, so numbers may coincide
            return None
        found = fitting[0]
        found.note_backward()
        if running is None:
            running = self._tasks[task] = _Running(found)
            Variable._execution_engine.queue_callback(functools.partial(_end, running))
        running.known, running.is_alone = found, not any(map(found.overlaps, passes))
        return found


@dataclass(eq=False)
class _Running:
    """The forward pass whose backward pass is running."""

    known: ForwardPass
    is_alone: bool = False  # no other pass has numbers of its nodes


def _end(running: _Running) -> None:
    """No-op: the queued callback keeps ``running`` alive until the backward pass ends."""


def _same(first: AttentionMask | None, second: AttentionMask | None) -> bool:
    if first is None or second is None or first is second:
        return first is second
    return torch.equal(first.flat, second.flat)


class RepeatedSeeds:
    """The place where the layers of a module began to take seeds in one call; made before its forward pass."""

    def __init__(self, module: nn.Module) -> None:
        """Note what the layers have taken until now."""
        contexts: list[Any] = [getattr(inner, "rmm_context", None) for inner in module.modules()]
        different = {id(context): context for context in contexts if context is not None}.values()
        self._begun = [(context, context.seeds, dict(context.seeds.taken)) for context in different]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run a recomputation inside of the block with the seeds of the forward pass."""
        last = [context.seeds for context, *_ in self._begun]
        try:
            for context, seeds, taken in self._begun:
                context.seeds, seeds.repeated = seeds, dict(taken)
            yield
        finally:
            for (context, *_), seeds in zip(self._begun, last, strict=True):
                context.seeds = seeds


class RunningForward(threading.local):
    """The forward pass that a thread runs: inputs of the modules that are running, the outermost first, and itself."""

    def __init__(self) -> None:
        self.inputs: list[CallInputs] = []
        self.outermost: nn.Module | None = None
        self.recomputing = False
        self.survey: Survey | None = None
