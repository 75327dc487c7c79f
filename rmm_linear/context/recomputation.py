"""Forward passes whose backward pass is still to come: masks and ids for activation checkpointing's recomputation.

A recomputation runs inside of the backward pass, without the modules around it. So every forward pass leaves behind
what the calls of its layers were given, and the recomputation finds its forward pass by the node that runs
(:mod:`rmm_linear.context.autograd_nodes`), in whatever order forward and backward passes come. A call whose forward
pass is not known is recomputed without a mask: that costs noise, where another pass's mask would bias the gradient.
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from rmm_linear.context.autograd_nodes import next_node, running_node
from rmm_linear.context.call_inputs import AttentionMask, CallInputs

_MOST = 64  # forward passes remembered; who never runs their backward passes must not fill the memory


@dataclass(eq=False)
class ForwardPass:
    """What the layers' calls in one forward pass were given.

    Attributes:
        module: The outermost module.
        begin: Number of its first node.
        end: Number of the first node after it, or None while it runs.
        calls: By the layer's number: N, the mask, the ids and the examples' numbers of its calls.
        is_recalled: Whether its backward pass has begun.
        is_forgotten: Whether calls were dropped, as its backward pass is over.
    """

    module: nn.Module
    begin: int
    end: int | None = None
    calls: dict[int, set[tuple[int, AttentionMask | None, Tensor | None, Tensor | None]]] = field(default_factory=dict)
    is_recalled: bool = False
    is_forgotten: bool = False

    def made(self, node: int) -> bool:
        """Say whether this forward pass made a node.

        Args:
            node: Its number.

        Returns:
            True from its first to its last node.
        """
        return self.begin <= node and (self.end is None or node < self.end)

    def find(self, index: int, tokens: int, name: str, masked: bool) -> CallInputs:
        """Return what the call was given that is now recomputed.

        A layer may be called several times in a pass. A mask that is not the call's own would bias the gradient; ids
        and numbers only decide its noise, and are left out where they could be another call's.

        Args:
            index: Number of the layer.
            tokens: N.
            name: Name of the layer.
            masked: Whether the layer wants the mask.

        Returns:
            What all fitting calls have in common.

        Raises:
            RuntimeError: If they have different masks, or were forgotten.
        """
        if self.is_forgotten and masked:
            raise RuntimeError(
                f"Activation checkpointing recomputes {name} a second time, and what its forward pass was given, an "
                "attention mask perhaps, is kept until another forward pass follows on its backward pass. Run all "
                "backward passes of a forward pass before the next one, or convert with mask_padding=False."
            )
        fitting = [call[1:] for call in self.calls.get(index, ()) if call[0] == tokens]
        if not fitting:
            return CallInputs()
        mask, ids, numbers = fitting[0]
        if masked and any(not _same(other, mask) for other, _, _ in fitting):
            raise RuntimeError(
                f"Activation checkpointing recomputes {name}, which was called several times in one forward pass, "
                "with different attention masks: the layer cannot tell which is its own. Call it in forward passes "
                "of their own, or convert with mask_padding=False."
            )
        ids = ids if all(other is ids for _, other, _ in fitting) else None
        numbers = numbers if all(other is numbers for _, _, other in fitting) else None
        return CallInputs(mask, ids, numbers)


class PendingForwards:
    """The forward passes of a model that may yet be recomputed."""

    def __init__(self) -> None:
        """Remember nothing."""
        self._passes: deque[ForwardPass] = deque(maxlen=_MOST)
        self._over: deque[ForwardPass] = deque(maxlen=_MOST)
        # By what the backward pass itself holds: one that fails runs no callback, but drops it.
        self._tasks: WeakValueDictionary[int, _Running] = WeakValueDictionary()

    def open(self, module: nn.Module) -> None:
        """Begin a forward pass, and forget those whose backward pass is over.

        Args:
            module: The outermost module.
        """
        self.close()  # of a pass that was interrupted
        self._tasks.clear()
        for known in [known for known in self._passes if known.is_recalled]:
            known.is_forgotten = any(mask is not None for calls in known.calls.values() for _, mask, _, _ in calls)
            known.calls.clear()
            self._passes.remove(known)
            self._over.append(known)
        self._passes.append(ForwardPass(module, next_node()))

    def close(self) -> None:
        """End the forward pass; one without gradients has no backward pass, and is not remembered."""
        if self._passes and self._passes[-1].end is None:
            self._passes[-1].end = next_node()
            if not torch.is_grad_enabled():
                self._passes.pop()

    def add(self, index: int, tokens: int, inputs: CallInputs) -> None:
        """Remember a call in the forward pass that runs; outside of one, nothing is given.

        Args:
            index: Number of the layer.
            tokens: N.
            inputs: What held for it, fitting N.
        """
        if self._passes and self._passes[-1].end is None:
            calls = self._passes[-1].calls.setdefault(index, set())
            calls.add((tokens, inputs.mask, inputs.input_ids, inputs.sample_index))

    def recall(self) -> ForwardPass | None:
        """Return the forward pass whose backward pass is running.

        Returns:
            The pass; None where it is not one of the model's, or came too long ago.
        """
        task = torch._C._current_graph_task_id()
        if task == -1:
            return None
        if self._tasks and task not in self._tasks:
            # A backward pass inside of a recomputation: what runs was made there.
            return list(self._tasks.values())[-1].known
        node = running_node()
        fitting = [] if node is None else [each for each in (*self._passes, *self._over) if each.made(node)]
        if len(fitting) != 1:  # every thread numbers its nodes by itself
            return None
        found = fitting[0]
        found.is_recalled = True
        running = self._tasks.get(task)
        if running is None:
            running = self._tasks[task] = _Running(found)
            Variable._execution_engine.queue_callback(functools.partial(_end, running))
        running.known = found
        return found


@dataclass(eq=False)
class _Running:
    """The forward pass whose backward pass is running."""

    known: ForwardPass


def _end(running: _Running) -> None:
    """No-op: the queued callback keeps ``running`` alive until the backward pass ends."""


def _same(first: AttentionMask | None, second: AttentionMask | None) -> bool:
    if first is None or second is None or first is second:
        return first is second
    return torch.equal(first.flat, second.flat)
