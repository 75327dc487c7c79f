"""Save and restore the buffers of modules, such as running statistics: the tensors, and their values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

_CHANGED = (
    "The backward pass computes again what the forward pass computed, but a buffer of shape {} was changed in place "
    "between the two. Run the backward pass first, or assign a new tensor."
)
_SMALL = 4096  # bytes of a copy that is kept
Overwritten = dict[int, tuple[Tensor, Tensor]]  # by the tensor's id: the tensor, and what it held


@dataclass(frozen=True, eq=False)
class _Held:
    """A tensor and a copy of what it held. The reference is weak: a tensor that was replaced may be gone."""

    tensor: Callable[[], Tensor | None]
    value: Tensor
    version: int
    is_shared: bool = False  # the value is the tensor itself, which nothing may change

    def restored(self, overwritten: Overwritten, still: Collection[int], *, whole: bool) -> Tensor:
        """Write the value into the tensor, behind autograd's back: a graph may have saved it."""
        tensor = self.tensor()
        if self.is_shared:
            if version_of(self.value) != self.version:
                raise RuntimeError(_CHANGED.format(tuple(self.value.shape)))
            return self.value
        if tensor is None:
            return self.value.clone()  # a copy, for it may be changed, and be needed again
        is_still = id(tensor) in still and version_of(tensor) == self.version
        if is_still and (not whole or _is_known_to_be(tensor, self.value)):
            return tensor
        _note(tensor, overwritten)
        if id(tensor) in overwritten:
            tensor.data.copy_(self.value)
        return tensor


class Buffers:
    """The buffers of modules at one moment."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        tensors: Sequence[Tensor] = (),
        last: Buffers | None = None,
        still: Collection[int] = (),
    ) -> None:
        """Copy the buffers of modules, parts of modules too; ``last`` has copies of what has not changed since."""
        self.modules, self.held = modules, list[_Held]()
        numbers: dict[int, int] = {}

        def is_as(old: _Held, tensor: Tensor) -> bool:
            by_version = id(tensor) in still
            return version_of(tensor) == old.version if by_version else torch.equal(tensor, old.value)

        def number(tensor: Tensor, name: str, names: dict[str, int | None]) -> int:
            if id(tensor) not in numbers:
                numbers[id(tensor)] = len(self.held)
                place = names.get(name)
                old = None if last is None or place is None else last.held[place]
                if old is None or old.tensor() is not tensor or not is_as(old, tensor):
                    copy = tensor.detach()
                    copy = copy if _is_expanded(tensor) else copy.clone()
                    old = _Held(TensorWeakRef(tensor), copy, version_of(tensor))
                self.held.append(old)
            return numbers[id(tensor)]

        earlier = [{}] * len(modules) if last is None else last.names
        self.names: list[dict[str, int | None]] = [
            {name: None if one is None else number(one, name, names) for name, one in module._buffers.items()}
            for module, names in zip(modules, earlier, strict=True)
        ]
        for tensor in tensors:
            number(tensor, "", {})

    def share(self) -> set[int]:
        """Drop the copies of masks and indices that a run has left as they were, and return their ids.

        Numbers, such as running statistics, may change without a trace.
        """
        for place, held in enumerate(self.held):
            tensor = held.tensor()
            is_mask = tensor is not None and not (tensor.is_floating_point() or tensor.is_complex())
            is_mask = tensor is not None and is_mask and tensor.nbytes >= _SMALL
            if tensor is not None and is_mask and not tensor.is_inference() and tensor._version == held.version:
                self.held[place] = _Held(TensorWeakRef(tensor), tensor, held.version, is_shared=True)
        return {id(held.value) for held in self.held if held.is_shared}

    def is_as(self, last: Buffers) -> bool:
        """Say whether nothing has changed since the ones that were handed in as ``last``."""
        return self.names == last.names and all(new is old for new, old in zip(self.held, last.held, strict=True))

    @property
    def values(self) -> list[Tensor]:
        """Return what the tensors held, for a store; :meth:`with_values` takes it back."""
        return [held.value for held in self.held]

    def with_values(self, values: Sequence[Tensor]) -> Buffers:
        """Return the same buffers with other copies of what they held."""
        made = object.__new__(Buffers)
        made.modules, made.names = self.modules, self.names
        made.held = [replace(held, value=value) for held, value in zip(self.held, values, strict=True)]
        return made

    def still(self, moved: Collection[int]) -> set[int]:
        """Return the tensors, by their ids, that have not changed since, but for those that are known to have moved."""
        there = [(held.tensor(), held.version) for held in self.held]
        return {id(t) for t, version in there if t is not None and id(t) not in moved and version_of(t) == version}

    def set(self, overwritten: Overwritten, still: Collection[int] = (), *, whole: bool = False) -> None:
        """Put the tensors back where they were, with what they held; ``still`` ones hold it, or ``whole`` looks."""
        tensors = [held.restored(overwritten, still, whole=whole) for held in self.held]
        for module, names in zip(self.modules, self.names, strict=True):
            _put(module, {name: None if place is None else tensors[place] for name, place in names.items()})


def version_of(tensor: Tensor) -> int:
    """Return the version counter of a tensor; one of inference mode has none."""
    return 0 if tensor.is_inference() else tensor._version


def parts_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules and the modules inside of them, each once."""
    return [*dict.fromkeys(part for module in modules for part in module.modules())]


@contextmanager
def buffers_kept(
    modules: Sequence[nn.Module], tensors: Iterable[Tensor] = (), still: Collection[int] = ()
) -> Iterator[Overwritten]:
    """Leave buffers as they are now: the same tensors, with the same values; those that are ``still`` stay so."""
    there = [dict(module._buffers.items()) for module in modules]
    overwritten: Overwritten = {}
    for tensor in (*(each for named in there for each in named.values()), *tensors):
        if tensor is not None and id(tensor) not in still:
            _note(tensor, overwritten)
    try:
        yield overwritten
    finally:
        for module, named in zip(modules, there, strict=True):
            _put(module, named)
        _write(overwritten.values())


@contextmanager
def buffers_as_left(overwritten: Overwritten, still: Collection[int] = ()) -> Iterator[None]:
    """Inside of :func:`buffers_kept`, show what it will leave to a backward pass that has saved some of the tensors."""
    moving = [both for key, both in overwritten.items() if key not in still]
    differs = [(tensor, value) for tensor, value in moving if not _is_known_to_be(tensor, value)]
    working = [(tensor, tensor.detach().clone()) for tensor, _ in differs]
    _write(differs)
    try:
        yield
    finally:
        _write(working)


def _write(values: Iterable[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in values:
        tensor.data.copy_(value)


def _is_known_to_be(tensor: Tensor, value: Tensor) -> bool:
    """Compare values where nothing has to be waited for."""
    return tensor.device.type == "cpu" and torch.equal(tensor, value)


def _is_expanded(tensor: Tensor) -> bool:
    """Say whether elements share memory, so that nothing can be written, and nothing need be."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _note(tensor: Tensor, overwritten: Overwritten) -> None:
    if id(tensor) not in overwritten and not _is_expanded(tensor):
        overwritten[id(tensor)] = tensor, tensor.detach().clone()


def _put(module: nn.Module, named: dict[str, Tensor | None]) -> None:
    now = dict(module._buffers.items())
    for name in now.keys() - named.keys():
        del module._buffers[name]
    for name, tensor in named.items():
        if name not in now or now[name] is not tensor:
            module._buffers[name] = tensor
