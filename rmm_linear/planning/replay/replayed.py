"""Run a forward pass again as it ran: with the same random numbers, buffers, autocast and parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import CellType, CodeType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils.weak import TensorWeakRef

from rmm_linear._support.autocast import autocast_as, autocast_now
from rmm_linear.planning.replay.buffers import Buffers, Overwritten, buffers_as_left, buffers_kept, parts_of, version_of

_EMPTY = CellType()  # as of a function that captures a name before it is given a value
_MANY = 1000  # entries of a container in which modules are looked for


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return the version counters of tensors; those of inference mode have none."""
    return [version_of(tensor) for tensor in tensors]


def accelerators(leaves: Iterable[Any]) -> list[torch.device]:
    """Return the devices of tensors whose generators are not the CPU's, in a fixed order."""
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
    return sorted((device for device in devices if device.type not in ("cpu", "meta")), key=str)


def generator_states(devices: Sequence[torch.device], last: list[Tensor] | None = None) -> list[Tensor]:
    """Return the states of the global generators: 5 KB for the CPU's, some bytes for the others."""
    found = [torch.get_rng_state(), *(torch.get_device_module(device).get_rng_state(device) for device in devices)]
    if last is not None and all(torch.equal(new, old) for new, old in zip(found, last, strict=True)):
        return last
    return found


def set_generator_states(states: Sequence[Tensor], devices: Sequence[torch.device]) -> None:
    """Set what :func:`generator_states` returned."""
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=True):
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def forked(devices: Sequence[torch.device]) -> Iterator[None]:
    """Restore the generators at the end of the block."""
    before = generator_states(devices)
    try:
        yield
    finally:
        set_generator_states(before, devices)


@dataclass(frozen=True)
class Seen:
    """The random numbers and buffers that a forward pass reads, at one moment."""

    generators: list[Tensor]  # states of the global random generators; empty where other code repeats the numbers
    buffers: Buffers

    @property
    def tensors(self) -> list[Tensor]:
        """All of it, for a store; :meth:`with_tensors` takes it back."""
        return [*self.generators, *self.buffers.values]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Seen:
        """Return the same with the tensors that a store gave back."""
        drawn = len(self.generators)
        return Seen([*tensors[:drawn]], self.buffers.with_values(tensors[drawn:]))


def modules_behind(function: Any) -> list[nn.Module]:
    """Return the modules that a callable is, belongs to, or names: in its arguments or closure, or globally."""
    found: list[nn.Module] = []
    todo, seen = [function], set[int]()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            found.append(one)
        elif isinstance(one, functools.partial):
            todo += [one.func, *one.args, *one.keywords.values()]
        elif inspect.ismethod(one):
            todo += [one.__self__, one.__func__]
        elif inspect.isfunction(one):
            todo += [cell.cell_contents for cell in one.__closure__ or () if cell != _EMPTY]
            todo += [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
            named = [one.__globals__.get(name) for name in _names(one.__code__)]
            todo += [each for each in named if not inspect.isfunction(each) or each.__module__ == one.__module__]
        elif callable(one) and not isinstance(one, type) and inspect.isfunction(type(one).__call__):
            todo += [type(one).__call__, vars(one) if hasattr(one, "__dict__") else None]
        elif isinstance(one, list | tuple | dict) and len(one) <= _MANY:
            todo += one.values() if isinstance(one, dict) else one
    return found


def _names(code: CodeType) -> Iterator[str]:
    """Return the global names in a function's code, and in that of functions inside of it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


class Replayed:
    """Modules, or a function that reaches some, that run once and then again."""

    def __init__(
        self,
        modules: Iterable[nn.Module] = (),
        arguments: Iterable[Any] = (),
        *,
        written: Sequence[Tensor] = (),
        draws: bool = False,
    ) -> None:
        """Look at the state before the first run."""
        self.modules = [*modules]
        self.parts, self.written = parts_of(self.modules), [*written]
        # Weak: whoever needs an argument again has it, or has it in host memory.
        given = [each for each in arguments if isinstance(each, Tensor)]
        self._given = [(TensorWeakRef(each), versions([each])) for each in given]
        self._named = [dict(part._parameters.items()) for part in self.parts]
        parameters = [each for named in self._named for each in named.values() if each is not None]
        if draws and any(map(is_lazy, parameters)):
            raise RuntimeError("Steps are tried first, and one has a lazy module. Run the module once before.")
        parameters = [each for each in parameters if not is_lazy(each)]
        self._parameters = [*zip(parameters, versions(parameters), strict=True)]
        self._modes = [part.training for part in self.parts]
        constant = [*given, *parameters]
        self.draws, self.devices = draws, accelerators(constant)
        self.autocasts = autocast_now(sorted({"cpu", *(device.type for device in self.devices)}))
        self._overwritten: Overwritten = {}  # inside of kept()
        self._moved = set[int]()  # buffers by their ids, as the following
        self._still: set[int] | None = (
            None  # version counters say whether they change; None before the first repetition
        )
        if draws and parametrize._cache_enabled and any(map(parametrize.is_parametrized, self.parts)):
            raise RuntimeError(
                "Steps run without gradients first, and parametrize.cached() would keep weights without gradients. "
                "Call bptt or sweep outside of it."
            )

    def seen(self, last: Seen | None = None) -> Seen:
        """Return what a run would read now: ``last`` itself if all is as it was, and its copies of what is."""
        drawn = generator_states(self.devices, None if last is None else last.generators) if self.draws else []
        buffers = Buffers(self.parts, self.written, None if last is None else last.buffers, self._still or ())
        if self.draws:
            self._refuse_graphs()
        if last is not None:
            old = {*map(id, last.buffers.held)}
            self._moved |= {id(held.tensor()) for held in buffers.held if id(held) not in old}
            if self._still is None:  # one step has run: it alone is asked about each value, as that takes time
                self._still = last.buffers.still(self._moved)
        if last is not None and drawn is last.generators and buffers.is_as(last.buffers):
            return last
        return Seen(drawn, buffers)

    def share(self, seen: Seen) -> None:
        """Drop copies of what the run has left as it was, for a run that is repeated once."""
        self._still = seen.buffers.share()

    def _refuse_graphs(self) -> None:
        for part in self.parts:
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.grad_fn is not None:
                    raise RuntimeError(
                        f"A step must hand gradients on by its state alone, but it left the buffer {name!r} of "
                        f"{type(part).__name__} with a graph. Detach what goes into the buffer, or make it a part of "
                        "the state."
                    )

    def settle(self, begin: Seen, last: Seen | None) -> bool:
        """Note which buffers no run has changed, so that :meth:`set` leaves them; return whether some have moved."""
        believed, self._still = self._still or set(), set()
        last = last or begin
        end = self.seen(last)
        self._still = begin.buffers.still(self._moved)
        silent = (believed & self._moved) & last.buffers.still(())
        for part in self.parts if silent else ():
            for name, buffer in part._buffers.items():
                if id(buffer) in silent:
                    raise RuntimeError(
                        f"The first step left the buffer {name!r} of {type(part).__name__} as it was, and a later one "
                        "wrote it through .data, which leaves no trace. Use buffer.copy_(...) under torch.no_grad()."
                    )
        return end.generators is not begin.generators or len(self._still) < len(begin.buffers.held)

    def set(self, seen: Seen, *, whole: bool = False) -> None:
        """Let the next run read, inside of :meth:`kept`, what :meth:`seen` found; ``whole`` looks at all values."""
        if seen.generators:
            set_generator_states(seen.generators, self.devices)
        seen.buffers.set(self._overwritten, self._still or (), whole=whole)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Run in the modes of the first run, and leave generators, buffers and modes as they are now."""
        states, outer = generator_states(self.devices) if self.draws else [], self._overwritten
        modes = [part.training for part in self.parts]
        try:
            self._set_modes(self._modes)
            with buffers_kept(self.parts, self.written, self._still or ()) as self._overwritten:
                yield
        finally:
            self._overwritten = outer
            self._set_modes(modes)
            if states:
                set_generator_states(states, self.devices)

    def _set_modes(self, modes: Sequence[bool]) -> None:
        for part, mode in zip(self.parts, modes, strict=True):
            if part.training != mode:
                part.training = mode

    def as_left(self) -> AbstractContextManager[None]:
        """Inside of :meth:`kept`, show buffers as they will be left, to a backward pass that has saved some."""
        return buffers_as_left(self._overwritten, self._still or ())

    def autocast(self, *, cached: bool = False) -> AbstractContextManager[None]:
        """Enter autocast as it was before the first run; see :func:`autocast_as`."""
        return autocast_as(self.autocasts, cached=cached)

    def again(self, seen: Seen, *others: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
        """Return a context in which a run repeats one, and which leaves generators and buffers as it finds them."""

        @contextmanager
        def entered() -> Iterator[None]:
            self.check()
            with self.kept(), ExitStack() as stack:
                self.set(seen)
                for make in others:
                    stack.enter_context(make())
                yield

        return _Reusable(entered)

    def check(self) -> None:
        """Raise if a repetition would not compute what the first run did."""
        change = ""
        for reference, version in self._given:
            if (each := reference()) is not None and versions([each]) != version:
                change = f"an input of shape {tuple(each.shape)} was changed in place"
        for each, version in self._parameters:
            if versions([each]) != [version]:
                change = f"the parameter {self._name_of(each)!r} was changed in place"
        for part, named in zip(self.parts, self._named, strict=True):
            there = dict(part._parameters.items())
            for name, each in named.items():
                now = there.get(name)
                if now is not each and _is_other(now, each):
                    change = f"the parameter {name!r} of {type(part).__name__} was replaced"
        if change:
            raise RuntimeError(
                f"The backward pass computes again what the forward pass computed, but {change} between the two. Run "
                "the backward pass before the optimizer's step, and clone what is changed."
            )

    def _name_of(self, parameter: Tensor) -> str:
        named = {id(each): name for module in self.modules for name, each in module.named_parameters()}
        return named.get(id(parameter), "")


def _is_other(now: Tensor | None, then: Tensor | None) -> bool:
    """Say whether a parameter was replaced, and not lent by a wrapper that shards or moves parameters."""
    if now is None or then is None or now.is_meta or then.is_meta or is_lazy(then):
        return False
    return type(now) is type(then) or type(then) is Tensor  # functional_call lends plain tensors


class _Reusable(AbstractContextManager[None]):
    """Makes a context every time it is entered."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[object]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)
