"""Follow live bytes, and which module made them in which pass, while a step runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rmm_linear.activations.experts import PackedExperts
from rmm_linear.activations.gated import PackedGatedMLP
from rmm_linear.memory.peak import GRADIENTS, RECOMPUTED, SAVED, TEMPORARY, LiveTensor, LiveTensors, Peak, strided
from rmm_linear.memory.quantized import dequantized_bytes
from rmm_linear.ops.dispatch import OPERATORS
from rmm_linear.planning.step.flash import flash_workspace
from rmm_linear.planning.step.flops import moved, operations
from rmm_linear.planning.step.ring import current_ring
from rmm_linear.planning.step.workspace import Workspace, key_of

FORWARD, BACKWARD, RECOMPUTATION = "forward", "backward", "recomputation"
_EMPTY = torch.ops.aten.empty.memory_format  # by which storages were made that a step resizes


class Made:
    """A storage that an operator has made; ``is_gradient`` says that it became that of a parameter's gradient."""

    __slots__ = ("dtype", "func", "is_gradient", "module", "pass_", "shape")

    def __init__(self, pass_: str, module: str, func: Any, tensor: Tensor | None) -> None:
        """Note the operator, and the tensor that it returned; None for bytes that it takes beyond its results."""
        self.pass_, self.module, self.func, self.is_gradient = pass_, module, func, False
        self.shape, self.dtype = (None, None) if tensor is None else (tensor.shape, tensor.dtype)


class Event(NamedTuple):
    """An allocation, a release, or the beginning of a module's forward pass."""

    now: int  # live bytes after it
    pass_: str
    running: str  # the innermost module that is running
    change: int  # bytes allocated; negative for a release, 0 where a module begins
    made: Made | None = None  # the storage; None where a module begins

    @property
    def moment(self) -> str:
        return f"{self.pass_} of {self.running or 'the model'}"


@dataclass
class Place:
    """The modules that a step is in."""

    modules: list[str] = field(default_factory=list)  # the modules whose forward pass is running, outermost first
    backward: str = ""  # the module whose backward pass was entered last
    entered: Callable[[], None] = lambda: None  # is called when a module's forward pass begins
    classes: dict[str, str] = field(default_factory=dict)  # the names of the classes of all modules

    @property
    def now(self) -> tuple[str, str]:
        """The pass, and the innermost module."""
        if torch._C._current_graph_task_id() == -1 and (self.modules or not self.backward):
            return FORWARD, self.modules[-1] if self.modules else ""
        return (RECOMPUTATION, self.modules[-1]) if self.modules else (BACKWARD, self.backward)


@contextmanager
def followed(model: nn.Module) -> Iterator[Place]:
    """Know which module runs forward or backward inside the block.

    A module's backward pass begins with the autograd node that made its output. A module that ran with gradients and
    runs without them again, as a model without its adapters does for reference, is then no part of the step.
    """
    place, known, trained = Place(), set[int](), set[str]()
    place.classes = {name: type(module).__name__ for name, module in model.named_modules()}

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if torch.is_grad_enabled():
                trained.add(name)
            place.modules.append(name if torch.is_grad_enabled() or name not in trained else "")
            place.entered()

        return hook

    def leave(name: str) -> Callable[..., None]:
        def begin(_: Any) -> None:
            place.backward = name

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            place.modules.pop()
            if torch._C._current_graph_task_id() != -1:
                return
            for leaf in tree_leaves(output):
                node = leaf.grad_fn if isinstance(leaf, Tensor) else None
                # The innermost module leaves first; those around it return the same tensor.
                if node is not None and node._sequence_nr() not in known:
                    known.add(node._sequence_nr())
                    node.register_prehook(begin)

        return hook

    # A gated MLP whose activation has hooks runs it once more, to see whether they change something.
    gated = [module for module in model.modules() if isinstance(module, PackedGatedMLP)]
    skipped = {module.rmm_parts.act_of(module) for module in gated}
    # Experts differentiate theirs in the forward pass, which is no backward pass of the model.
    experts = [module for module in model.modules() if isinstance(module, PackedExperts)]
    skipped |= {one for module in experts for one in module.modules() if one is not module}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if module in skipped:
                continue
            stack.callback(module.register_forward_pre_hook(enter(name), prepend=True).remove)
            stack.callback(module.register_forward_hook(leave(name), always_call=True).remove)
        yield place


class FollowedTensors(LiveTensors):
    """Adds up live bytes and remembers every change with its place."""

    def __init__(
        self,
        result: Peak,
        place: Place,
        workspace: Workspace | None = None,
        *,
        is_meta: bool = False,
        per_byte: tuple[float, float] | None = None,
    ) -> None:
        """Count into a result, which has the peak so far; :meth:`finish` adds the rest.

        ``is_meta`` says that tensors of the CPU stand for those of an accelerator. With ``per_byte``, ``work`` is the
        step's operations, and so many more for every byte that an operator of PyTorch, or of the library, reads or
        writes.
        """
        super().__init__(result)
        self.is_meta, self.per_byte, self.work = is_meta, per_byte, 0.0
        self.place = place
        self.workspace = workspace or {}
        self.events: list[Event] = []
        self.random: set[str] = set()  # modules that draw random numbers
        self._made: dict[int, Made] = {}
        self._open = True
        place.entered = self._enter

    def _see(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random.add(self.place.now[1])
        super()._see(func, args, kwargs, output)
        if self.per_byte is not None:
            per_byte = self.per_byte[func.namespace == "rmm_linear"]
            self.work += operations(func, args, kwargs, output) + per_byte * moved(func, args, kwargs, output)
        beyond = self.workspace.get(key_of(func, args, kwargs), 0) if self.workspace else 0
        beyond = beyond or _declared(func, args) or dequantized_bytes(func, args, kwargs)
        beyond = beyond or flash_workspace(func, args, is_meta=self.is_meta)
        if (ring := current_ring()) is not None:
            beyond = ring.workspace(func, args, kwargs, beyond) or beyond
        if beyond:
            pass_, running = self.place.now
            made = Made(pass_, running, func, None)
            self.events.append(Event(self.now + beyond, pass_, running, beyond, made))
            self.events.append(Event(self.now, pass_, running, -beyond, made))

    def _enter(self) -> None:
        """Note where the step is: a module may allocate nothing, and what follows is still after it."""
        self.events.append(Event(self.now, *self.place.now, 0))

    def _add(self, storage: torch.UntypedStorage, tensor: Tensor | None, func: Any) -> None:
        key, size = storage._cdata, storage.nbytes() if tensor is not None else 0
        pass_, running = self.place.now
        self.live[key], made = size, Made(pass_, running, func, tensor)
        self._made[key] = made
        self.now += size
        self.events.append(Event(self.now, pass_, running, size, made))
        weakref.finalize(storage, self._forget, key).atexit = False

    def finished(self, gradient: Tensor, size: int | None) -> None:
        """Take a tensor for a parameter's gradient, and count so many bytes for it from now on; None leaves them."""
        for part in strided(gradient):
            key = part.untyped_storage()._cdata
            if key not in self.live:
                continue
            self._made[key].is_gradient = size is None or size > 0
            self._change(key, 0 if size is None else size - self.live[key])

    def _resized(self, storage: torch.UntypedStorage, change: int) -> None:
        if storage._cdata not in self.live:
            self._add(storage, None, _EMPTY)
        self._change(storage._cdata, change)

    def _change(self, key: int, change: int) -> None:
        if change:
            self.live[key] += change
            self.now += change
            self.events.append(Event(self.now, *self.place.now, change, self._made[key]))

    def _forget(self, key: int) -> None:
        size, made = self.live.pop(key), self._made.pop(key)
        if self._open:  # what the step leaves is not released by it
            self.now -= size
            self.events.append(Event(self.now, *self.place.now, -size, made))

    def finish(self) -> None:
        """End the record and write it into the result."""
        self._open = False
        result = self.result
        if not self.events:
            return
        highest = max(range(len(self.events)), key=lambda place: self.events[place].now)
        turn = next((place for place, event in enumerate(self.events) if event.pass_ != FORWARD), len(self.events))
        result.bytes, result.moment = self.events[highest].now, self.events[highest].moment
        saved = _alive(self.events[:turn])
        result.alive = [
            LiveTensor(
                size,
                made.module,
                self.place.classes.get(made.module, ""),
                made.func._opname,
                _kind(made, is_saved=made in saved),
                tuple(made.shape or ()),
                str(made.dtype or "workspace").removeprefix("torch."),
            )
            for made, size in _alive(self.events[: highest + 1]).items()
        ]
        result.timeline = [(event.now, event.moment) for event in self.events]


def _alive(events: Iterable[Event]) -> dict[Made, int]:
    """Return the storages that are there after events, with their bytes."""
    found: dict[Made, int] = {}
    for event in events:
        if event.made is not None:
            found[event.made] = found.get(event.made, 0) + event.change
            if not found[event.made]:
                del found[event.made]
    return found


def _kind(made: Made, *, is_saved: bool) -> str:
    if made.is_gradient:
        return GRADIENTS
    return SAVED if is_saved else RECOMPUTED if made.pass_ == RECOMPUTATION else TEMPORARY


def _declared(func: Any, args: Any) -> int:
    """Return the bytes that an operator of the library says it takes beyond its results, of which a CPU counts none."""
    if func.namespace != "rmm_linear":
        return 0
    known = OPERATORS.get(func._opname)
    return known.workspace(*args) if known is not None and known.workspace and args[0].is_cuda else 0
