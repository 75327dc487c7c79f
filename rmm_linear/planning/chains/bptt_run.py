"""Run a plan: forward pass, and backward pass with what is computed again for it."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rmm_linear._support.autocast import autocast_as, autocast_now
from rmm_linear.memory.ledger import storage_key
from rmm_linear.planning.chains.bptt_frames import Around, Frame, StoredFrame, compact, release_all
from rmm_linear.planning.chains.bptt_plans import Action, BPTTPlan
from rmm_linear.planning.chains.bptt_trial import check_reached, leaves_of
from rmm_linear.planning.chains.cells import Recorded, Step, is_differentiable, module_of
from rmm_linear.planning.replay.buffers import buffer_places, buffer_values, restored_buffers, set_buffer_values
from rmm_linear.planning.replay.generators import accelerators, forked, generator_states, set_generator_states


class Outputs:
    """The outputs of all steps, written as they come."""

    def __init__(self, steps: int) -> None:
        """Wait for the first step, which shows what outputs are like."""
        self.steps = steps
        self.leaves: list[Any] | None = None

    def put(self, number: int, found: Sequence[Any]) -> None:
        """Take the leaves of a step's output.

        Args:
            number: The step.
            found: Tensors, or None.

        Raises:
            TypeError: If a leaf is neither.
            ValueError: If its shape or dtype differs from that of the first step, or one of them is None.
        """
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


class Run:
    """One call of bptt: what is kept between its forward and its backward pass."""

    def __init__(self, step: Step, plan: BPTTPlan, parameters: Sequence[Tensor] | None, store: Any) -> None:
        """Prepare a run; ``parameters`` are those of a function, None takes those of the module that the cell is."""
        self.step, self.plan, self.store, self.name = step, plan, store, uuid.uuid4().hex[:12]
        self.module = module_of(step.cell) if parameters is None else None
        # In place of a module's parameters, their aliases get the gradients of single steps: hooks see the sum alone.
        named = {} if self.module is None else dict(self.module.named_parameters())
        named = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self.parameters = list(named.values()) if parameters is None else list(parameters)
        self.names = [f"module.{name}" for name in named]
        self.leaves = self.parameters if parameters else [one.detach().requires_grad_() for one in self.parameters]
        self.inputs: list[Tensor] = []
        self.frames: list[Frame] = []
        self.current: list[Any] | None = None
        self.output_leaves: list[Any] = []
        self.last_leaves: list[Any] = []
        self.is_replayed = self.is_moved = False
        self.rest: Iterator[Action] | None = None

    def forward(self, inputs: list[Tensor], state: list[Any]) -> tuple[list[Any], list[Any]]:
        """Run all steps.

        Args:
            inputs: Leaves of the inputs, time first.
            state: Leaves of the initial state.

        Returns:
            The leaves of the outputs, stacked, and of the last state.
        """
        self.devices = accelerators((*inputs, *state))
        self.autocast = autocast_now(sorted({"cpu", *(device.type for device in self.devices)}))
        self.needs = [leaf.requires_grad for leaf in inputs]
        self.needs_state = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in state]
        self.lasting = {storage_key(leaf) for leaf in (*inputs, *state) if isinstance(leaf, Tensor)}
        self.buffers = [] if self.module is None else buffer_places([self.module])
        self.begin = Around(generator_states(self.devices), buffer_values(self.buffers))
        outputs, actions = Outputs(self.plan.steps), self.plan.actions()
        read = Frame(0, [*inputs, *state])
        self.inputs, self.frames = inputs, [Frame(0, state, self.begin)]

        def work() -> None:
            for action in actions:
                if action.kind == "backward":
                    self.rest = itertools.chain([action], actions)
                    return
                self._do(action, outputs.put)

        try:
            self._inside(work)
        except BaseException:  # the traceback keeps the frames
            release_all(self.frames)
            self.inputs, self.frames, self.current, self.rest = [], [], None, None
            raise
        read.read()  # raises if the cell changed its inputs
        self._forget_what_stays()
        # Tensors of their own: what is put out refers to the graph, which refers to the frames.
        last = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self.frames[-1].read()]
        self.inputs, self.frames[0] = [], Frame(0, [])  # saved for backward instead
        return outputs.leaves or [], last

    def backward(
        self, inputs: list[Tensor], state: list[Any], grads: Sequence[Tensor | None], grad_state: list[Tensor | None]
    ) -> list[Tensor | None]:
        """Run the backward pass.

        Args:
            inputs: Leaves of the inputs.
            state: Leaves of the initial state.
            grads: Gradients with respect to the leaves of the outputs.
            grad_state: Gradients with respect to the leaves of the last state.

        Returns:
            Gradients with respect to the inputs, the initial state and the parameters.
        """
        actions, frames = self.rest, self.frames
        self.rest, self.frames = None, []
        self.grads, self.grad_state = grads, grad_state
        self.grad_inputs: list[Tensor | None] = [None] * len(inputs)
        self.grad_parameters: list[Tensor | None] = [None] * len(self.leaves)
        self.inputs, self.current, self.is_replayed = inputs, None, True
        begin = Frame(0, state, self.begin)
        if actions is None:  # a second backward pass, with retain_graph: from the beginning
            actions, frames = self.plan.actions(), [begin]
        frames[0] = begin
        self.frames = frames

        def work() -> None:
            for action in actions:
                self._do(action)

        try:
            modules = [] if self.module is None else [self.module]
            with forked(self.devices), restored_buffers(modules), autocast_as(self.autocast):
                self._inside(work)
            return [*self.grad_inputs, *self.grad_state, *self.grad_parameters]
        finally:
            release_all(self.frames)
            self.inputs, self.frames, self.current, self.grads = [], [], None, []
            del self.grad_inputs, self.grad_state, self.grad_parameters

    def _inside(self, work: Callable[[], None]) -> None:
        """Do what runs the cell, with the leaves in place of its module's parameters."""
        if self.module is None or not self.names:
            work()
        else:
            functional_call(_Holder(self.module), dict(zip(self.names, self.leaves, strict=True)), (work,))

    def _do(self, action: Action, put: Callable[[int, list[Any]], None] | None = None) -> None:
        if action.kind == "advance":
            state = self._state()
            with torch.no_grad(), autocast_as(self.autocast, cached=False):
                for number in range(action.step, action.end):
                    found, state = self.step([leaf[number] for leaf in self.inputs], state)
                    if put is not None:
                        put(number, found)
            self.current = state
        elif action.kind == "store":
            leaves = compact(self.current or [], self.lasting)
            if self.store is None:
                self.frames.append(Frame(action.step, leaves, self._around()))
            else:
                self.frames.append(StoredFrame(action.step, leaves, self._around(), self.store, self.name))
            # What is in a store need not be read to go on; what is in memory is, which sees if it was changed.
            self.current = None if self.store is None else leaves
        elif action.kind == "record":
            recorded = self._record(action.step)
            if put is not None:
                put(action.step, recorded.outputs)
            new = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in recorded.new]
            self.frames.append(Frame(action.step + 1, new, self._around() if action.is_kept else None, recorded))
            self.current = None
        else:
            frame = self.frames.pop()
            if frame.recorded is not None:
                self._backpropagate(frame.position - 1, frame.recorded)
            frame.release()

    def _state(self) -> list[Any]:
        """The state to go on from: where the last action ended, or the newest kept one."""
        if self.current is not None:
            return self.current
        frame = self.frames[-1]
        if self.is_replayed and self.is_moved and frame.around is not None:
            set_generator_states(frame.around.generators, self.devices)
            set_buffer_values(self.buffers, frame.around.buffers)
        return frame.read()

    def _around(self) -> Around | None:
        """What the step that comes next reads besides its state; what has not changed is kept once."""
        if self.is_replayed and not self.is_moved:
            return None
        last = self.frames[-1].around or self.begin
        return Around(generator_states(self.devices, last.generators), buffer_values(self.buffers, last.buffers))

    def _forget_what_stays(self) -> None:
        """At the end of the forward pass: keep no copies of buffers that the steps do not change."""
        end = Around(
            generator_states(self.devices, self.begin.generators), buffer_values(self.buffers, self.begin.buffers)
        )
        seen = [end, *(frame.around for frame in self.frames if frame.around is not None)]
        moving = [
            place
            for place, old in enumerate(self.begin.buffers)
            if any(around.buffers[place] is not old for around in seen)
        ]
        for frame in self.frames:
            if frame.around is not None:
                frame.around = frame.around._replace(buffers=[frame.around.buffers[place] for place in moving])
        self.begin = self.begin._replace(buffers=[self.begin.buffers[place] for place in moving])
        self.buffers = [self.buffers[place] for place in moving]
        self.is_moved = bool(moving) or end.generators is not self.begin.generators

    def _record(self, number: int) -> Recorded:
        state = self._state()
        needs = self.needs_state if number == 0 else [is_differentiable(leaf) for leaf in state]
        recorded = self.step.record([leaf[number] for leaf in self.inputs], state, [*self.needs, *needs])
        check_reached(leaves_of(recorded), self.leaves, self.module)
        return recorded

    def _backpropagate(self, number: int, recorded: Recorded) -> None:
        """The backward pass of one step: gradients of its state replace those of the next one's, the others add up."""
        pairs = [(leaf, None if g is None else g[number]) for leaf, g in zip(recorded.outputs, self.grads, strict=True)]
        pairs += zip(recorded.new, self.grad_state, strict=True)
        pairs = [(leaf, g) for leaf, g in pairs if g is not None and isinstance(leaf, Tensor) and leaf.requires_grad]
        own = [*recorded.inputs, *recorded.state]
        wanted = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in own]
        leaves = [*(leaf for leaf, needed in zip(own, wanted, strict=True) if needed), *self.leaves]
        found: Iterator[Tensor | None] = itertools.repeat(None)
        if pairs and leaves:
            results, grads = zip(*pairs, strict=True)
            found = iter(torch.autograd.grad(results, leaves, grads, allow_unused=True))
        values = [next(found) if needed else None for needed in wanted]
        for place, value in enumerate(values[: len(recorded.inputs)]):
            if value is not None:
                total = self.grad_inputs[place]
                total = torch.zeros_like(self.inputs[place]) if total is None else total
                total[number] = value
                self.grad_inputs[place] = total
        self.grad_state = values[len(recorded.inputs) :]
        for place, (value, total) in enumerate(zip(found, self.grad_parameters, strict=False)):
            if value is not None:  # cloned, for gradients of two parameters may be one tensor
                self.grad_parameters[place] = value.clone() if total is None else total.add_(value)


class _Holder(nn.Module):
    """Makes a module's parameters replaceable for the time of a function call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, work: Callable[[], None]) -> None:
        work()
