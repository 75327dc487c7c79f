"""Run a plan: forward pass, and backward pass with what is computed again for it."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rmm_linear.memory.ledger import storage_key
from rmm_linear.planning.chains.bptt_plans import Action, BPTTPlan
from rmm_linear.planning.chains.bptt_trial import check_reached
from rmm_linear.planning.chains.cells import RecordedCell, Step, module_of
from rmm_linear.planning.replay.reached import leaves_behind, pull_back
from rmm_linear.planning.replay.replayed import Replayed, Seen, modules_behind
from rmm_linear.planning.replay.snapshots import Snapshot, StoredSnapshot, is_differentiable, release_all


class Outputs:
    """The outputs of all steps, written as they come."""

    def __init__(self, steps: int) -> None:
        """Wait for the first step, which shows what outputs are like."""
        self.steps = steps
        self.leaves: list[Any] | None = None

    def put(self, number: int, found: Sequence[Any]) -> None:
        wrong = next((leaf for leaf in found if leaf is not None and not isinstance(leaf, Tensor)), None)
        if wrong is not None:
            raise TypeError(f"cell must put out tensors, or None, got {wrong!r}. Return others in the state.")
        if self.leaves is None:
            self.leaves = [leaf if leaf is None else leaf.new_empty((self.steps, *leaf.shape)) for leaf in found]
        for whole, leaf in zip(self.leaves, found, strict=True):
            first = None if whole is None else (tuple(whole.shape[1:]), whole.dtype)
            now = None if leaf is None else (tuple(leaf.shape), leaf.dtype)
            if first != now:
                raise ValueError(
                    "cell must put out tensors of one shape and dtype, which are stacked over the steps, or None at "
                    f"every step, got {now} after {first}."
                )
            if whole is not None and leaf is not None:
                whole[number] = leaf.detach()


class Frame(NamedTuple):
    """A saved state, and the step before it if its graph is saved too."""

    state: Snapshot | StoredSnapshot
    recorded: RecordedCell | None = None


class BPTTRun:
    """One call of bptt: its state between the forward and the backward pass."""

    def __init__(self, step: Step, plan: BPTTPlan, parameters: Sequence[Tensor] | None, store: Any) -> None:
        """Prepare a run; ``parameters`` are those of a function, None takes those of the module that the cell is."""
        self.step, self.plan, self.store, self.name = step, plan, store, uuid.uuid4().hex[:12]
        self.module = module_of(step.cell) if parameters is None else None
        # In place of a module's parameters, their aliases get the gradients of single steps: hooks see the sum alone.
        owned = [] if self.module is None else [one for one in self.module.parameters() if one.requires_grad]
        self.parameters = owned if parameters is None else list(parameters)
        self.leaves = self.parameters if parameters else [one.detach().requires_grad_() for one in self.parameters]
        self.inputs: list[Tensor] = []
        self.frames: list[Frame] = []
        self.current: list[Any] | None = None
        self.output_leaves: list[Any] = []
        self.last_leaves: list[Any] = []
        self.is_replayed = self.is_moved = False
        self.rest: Iterator[Action] | None = None

    def forward(self, inputs: list[Tensor], state: list[Any]) -> tuple[list[Any], list[Any]]:
        self.replayed = Replayed(modules_behind(self.step.cell), (*inputs, *state), draws=True)
        self.needs = [leaf.requires_grad for leaf in inputs]
        self.needs_state = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in state]
        self.lasting = {storage_key(leaf) for leaf in (*inputs, *state) if isinstance(leaf, Tensor)}
        self.begin = self.replayed.seen()
        outputs, actions = Outputs(self.plan.steps), self.plan.actions()
        read = Snapshot.of(0, [*inputs, *state], lasting=self.lasting)
        self.inputs, self.frames = inputs, [Frame(Snapshot.of(0, state, self.begin, self.lasting))]

        def work() -> None:
            for action in actions:
                if action.kind == "backward":
                    self.rest = itertools.chain([action], actions)
                    return
                self._do(action, outputs.put)

        try:
            self._inside(work)
        except BaseException:  # the traceback keeps the frames
            release_all([frame.state for frame in self.frames])
            self.inputs, self.frames, self.current, self.rest = [], [], None, None
            raise
        read.restored()  # raises if the cell changed its inputs
        seen = [frame.state.seen for frame in self.frames]
        is_moved = any(one is not None and one is not self.begin for one in seen)
        self.is_moved = self.replayed.settle(self.begin, seen[-1]) or is_moved
        # Tensors of their own: what is put out refers to the graph, which refers to the frames.
        last = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self.frames[-1].state.restored()]
        self.inputs, self.frames[0] = [], Frame(Snapshot.of(0, []))  # saved for backward instead
        return outputs.leaves or [], last

    def backward(
        self, inputs: list[Tensor], state: list[Any], grads: Sequence[Tensor | None], grad_state: list[Tensor | None]
    ) -> list[Tensor | None]:
        """Return gradients of inputs, initial state and parameters, from those of outputs and last state."""
        self.replayed.check()
        actions, frames = self.rest, self.frames
        self.rest, self.frames = None, []
        self.grads, self.grad_state = grads, grad_state
        self.grad_inputs: list[Tensor | None] = [None] * len(inputs)
        self.grad_parameters: list[Tensor | None] = [None] * len(self.leaves)
        self.inputs, self.current, self.is_replayed = inputs, None, True
        begin = Frame(Snapshot.of(0, state, self.begin, self.lasting))
        if actions is None:  # a second backward pass, with retain_graph: from the beginning
            actions, frames = self.plan.actions(), [begin]
        frames[0] = begin
        self.frames = frames

        def work() -> None:
            for action in actions:
                self._do(action)

        try:
            with self.replayed.kept(), self.replayed.autocast(cached=True):
                self.replayed.set(self.begin, whole=True)
                self._inside(work)
            return [*self.grad_inputs, *self.grad_state, *self.grad_parameters]
        finally:
            release_all([frame.state for frame in self.frames])
            self.inputs, self.frames, self.current, self.grads = [], [], None, []
            del self.grad_inputs, self.grad_state, self.grad_parameters

    def _inside(self, work: Callable[[], None]) -> None:
        """Do what runs the cell, with the leaves in place of its module's parameters."""
        if self.module is None or not self.parameters:
            work()
            return
        holder, leaves = _Holder(self.module), dict(zip(map(id, self.parameters), self.leaves, strict=True))
        places = {  # once for every module that has it: functional_call leaves others in modules with two names
            f"{part}.{name}": leaves[id(parameter)]
            for part, module in holder.named_modules()
            for name, parameter in module._parameters.items()
            if id(parameter) in leaves
        }
        functional_call(holder, places, (work,), tie_weights=False)

    def _do(self, action: Action, put: Callable[[int, list[Any]], None] | None = None) -> None:
        if action.kind == "advance":
            state = self._state()
            with torch.no_grad(), self.replayed.autocast():
                for number in range(action.step, action.end):
                    found, state = self.step([leaf[number] for leaf in self.inputs], state)
                    if put is not None:
                        put(number, found)
            self.current = state
        elif action.kind == "store":
            state = Snapshot.of(action.step, self.current or [], self._seen(), self.lasting)
            self.frames.append(Frame(state if self.store is None else StoredSnapshot(state, self.store, self.name)))
            # What is in a store need not be read to go on; what is in memory is, which sees if it was changed.
            self.current = None if self.store is None else state.leaves
        elif action.kind == "record":
            recorded = self._record(action.step)
            if put is not None:
                put(action.step, recorded.outputs)
            new = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in recorded.new]
            seen = self._seen() if action.is_kept else None
            self.frames.append(Frame(Snapshot.of(action.step + 1, new, seen, self.lasting), recorded))
            self.current = None
        elif action.kind == "take":
            self.current = self._state()
            self.frames.pop().state.release()
        else:
            frame = self.frames.pop()
            if frame.recorded is not None:
                self._backpropagate(frame.state.position - 1, frame.recorded)
            frame.state.release()

    def _state(self) -> list[Any]:
        """Return the state to go on from: where the last action ended, or the newest saved one."""
        if self.current is not None:
            return self.current
        state = self.frames[-1].state
        if self.is_replayed and self.is_moved and state.seen is not None:
            self.replayed.set(state.seen)
        return state.restored()

    def _seen(self) -> Seen | None:
        """Return what the next step reads in addition to its state; what has not changed is stored once."""
        if self.is_replayed and not self.is_moved:
            return None
        return self.replayed.seen(self.frames[-1].state.seen or self.begin)

    def _record(self, number: int) -> RecordedCell:
        state = self._state()
        needs = self.needs_state if number == 0 else [is_differentiable(leaf) for leaf in state]
        recorded = self.step.record([leaf[number] for leaf in self.inputs], state, [*self.needs, *needs])
        check_reached(leaves_behind(recorded.results, recorded.given), self.leaves, self.module)
        return recorded

    def _backpropagate(self, number: int, recorded: RecordedCell) -> None:
        """Run one step's backward pass: gradients of its state replace those of the next one's, others add up."""
        pairs = [(leaf, None if g is None else g[number]) for leaf, g in zip(recorded.outputs, self.grads, strict=True)]
        pairs += zip(recorded.new, self.grad_state, strict=True)
        pairs = [(leaf, g) for leaf, g in pairs if g is not None and isinstance(leaf, Tensor) and leaf.requires_grad]
        wanted = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in recorded.given]
        own = [leaf for leaf, needed in zip(recorded.given, wanted, strict=True) if needed]
        with self.replayed.as_left():
            results, self.grad_parameters = pull_back(pairs, own, self.leaves, self.grad_parameters)
        found = iter(results)
        values = [next(found) if needed else None for needed in wanted]
        for place, value in enumerate(values[: len(recorded.inputs)]):
            if value is not None:
                total = self.grad_inputs[place]
                total = torch.zeros_like(self.inputs[place]) if total is None else total
                total[number] = value
                self.grad_inputs[place] = total
        self.grad_state = values[len(recorded.inputs) :]


class _Holder(nn.Module):
    """Makes a module's parameters replaceable for the time of a function call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, work: Callable[[], None]) -> None:
        work()
