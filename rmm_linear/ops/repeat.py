"""Repeat what an earlier call has launched, without the Python that finds it out.

What a call of an operator allocates, and which kernels it launches, follows from shapes, strides, dtypes, alignment,
settings and numbers; the kernels' arguments follow from them too, but for addresses and seeds. Of the second call that
is alike, a :class:`Recording` notes all of it, and later ones allocate and launch the same: a few microseconds for each
kernel, where the functions between an operator and Triton's driver take several times as long.

A recording holds no tensors. It is made of calls that do nothing but allocate, view, fill and launch, on CUDA; while a
graph is captured, whose seeds are others, and while hooks look at launches, functions run as they are.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear.backends.select import ENVIRONMENT, SETTING
from rmm_linear.backends.triton import kernels
from rmm_linear.sketches.seeds import is_capturing
from rmm_linear.spec import SaveSpec

_MOST = 1024  # calls of an operator that are known
_VALUES = {type(None), int, float, bool, str, torch.dtype, SaveSpec}
_MADE = {"aten::empty.memory_format", "aten::new_empty", "aten::empty_like", "aten::zeros"}
_FILLED = {"aten::fill_.Scalar", "aten::zero_"}
_STREAM = 3  # the place of the stream among the arguments of a launch, behind the grid
_ALIGNED = 256  # bytes, as tensors are
_GIVEN = 2**31  # instead of a seed that is in its place already
Place = tuple[int, int]  # the number of a tensor, arguments first, and bytes from its beginning


class _Fill(NamedTuple):
    """A part of a tensor that is filled with a number; with the seed for None."""

    made: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    value: float | None


class _Launch(NamedTuple):
    """A launch: what to run, and its arguments: the stream among them, addresses, and seeds, each xor a number."""

    run: Callable[..., None]
    arguments: tuple[Any, ...]
    places: list[tuple[int, Place]]
    seeds: list[tuple[int, int]]


class Recording(NamedTuple):
    """What a call does."""

    device: torch.device  # of all its tensors
    # Shape and dtype of every tensor that it allocates, but for those that it needs no more when it returns
    made: list[tuple[torch.Size, torch.dtype]]
    scratch: int  # bytes of these, which lie behind one another
    steps: list[_Launch | _Fill]  # what it launches and fills, in this order
    # The numbers of the tensors that it returns, among those that it allocates, and their shapes where these are others
    returned: list[tuple[int, torch.Size | None]]
    is_one: bool  # whether it returns a tensor, and not a tuple

    def repeat(self, addresses: list[int], seed: int) -> Any:
        """Do it again with tensors at other addresses, and another seed."""
        device = self.device
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.made]
        addresses += [one.data_ptr() for one in made]
        if self.scratch:
            scratch = torch.empty(self.scratch, dtype=torch.uint8, device=device)
            addresses.append(scratch.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        for step in self.steps:
            if isinstance(step, _Fill):
                whole = made[step.made]
                whole = whole if whole.dtype == step.dtype else whole.view(step.dtype)
                part = whole.as_strided(step.shape, step.stride, step.offset)
                part.fill_(seed if step.value is None else step.value)
                continue
            run, arguments, places, seeds = step
            values = [*arguments]
            values[_STREAM] = stream
            for i, (number, offset) in places:
                values[i] = addresses[number] + offset
            for i, number in seeds:
                values[i] = seed ^ number
            run(*values)
        found = [made[i] if shape is None else made[i].view(shape) for i, shape in self.returned]
        return found[0] if self.is_one else tuple(found)


class Repeated:
    """A function whose calls are repeated by what they have launched.

    It has positional arguments, of which the first is a tensor; it changes none of them, and returns new tensors. If it
    has a ``seed`` that is a number, other numbers make the same launches.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        names = [*inspect.signature(function).parameters]
        self._seed = names.index("seed") if "seed" in names else None
        # None after the first call; False for one that cannot be repeated.
        self._known: dict[tuple[Any, ...], Recording | bool | None] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Run the function, or do what it has done for arguments that are alike."""
        if not arguments[0].is_cuda:
            return self.function(*arguments)
        key, addresses, seed = [ENVIRONMENT.get(SETTING), len(arguments)], [], None
        for i, value in enumerate(arguments):
            kind = type(value)
            if kind is Tensor or kind is nn.Parameter:
                address = value.data_ptr()
                addresses.append(address)
                key += (value.shape, value.stride(), value.dtype, value.get_device(), address % 16)
            elif i == self._seed:
                if kind is not int:  # drawn by the function
                    return self.function(*arguments)
                seed = value
            elif kind in _VALUES or (kind is tuple and all(type(one) in _VALUES for one in value)):
                key.append(value)
            else:
                return self.function(*arguments)
        key = (*key,)
        known = self._known.get(key, True)
        if known is False or not kernels().launch.can_launch(arguments[0].get_device()):
            return self.function(*arguments)
        if seed is not None and is_capturing(arguments[0].device):
            return self.function(*arguments)
        if type(known) is Recording:
            return known.repeat(addresses, seed or 0)
        if len(self._known) >= _MOST:
            self._known.clear()
        if known is True or seed == 0:  # which is no sign of a seed
            self._known[key] = None
            return self.function(*arguments)
        found, self._known[key] = _record(self.function, arguments, seed or 0)
        return found


class _Watching(TorchDispatchMode):
    """Notes the tensors that a call makes and fills, and whether it does anything else but view them."""

    def __init__(self, launches: list[Any]) -> None:
        super().__init__()
        self.launches, self.made, self.is_known = launches, list[Tensor](), True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, found = func.name(), func(*args, **(kwargs or {}))
        if name in _MADE and found.is_contiguous():
            self.made.append(found)
            self.launches += [(found, 0)] * (name == "aten::zeros")
        elif name in _FILLED:
            self.launches.append((args[0], args[1] if len(args) > 1 else 0))
        elif not getattr(func, "is_view", False):
            self.is_known = False
        return found


def _record(function: Callable[..., Any], arguments: tuple[Any, ...], seed: int) -> tuple[Any, Recording | bool]:
    """Call a function; return its result and the recording, or False."""
    with kernels().launch.recorded() as launches, _Watching(launches) as watching:
        found = function(*arguments)
    returned, made = [found] if isinstance(found, Tensor) else [*found], watching.made
    if not watching.is_known or not all(isinstance(one, Tensor) for one in returned):
        return found, False
    numbers = [i for one in returned for i, other in enumerate(made) if _is_same(one, other)]
    given = [one for one in arguments if isinstance(one, Tensor)]
    noted = [_step(one, given, made, seed) for one in launches]
    steps = [one for one in noted if one is not None]
    if len(numbers) != len(returned) or len(steps) != len(noted) or any(one.device != given[0].device for one in made):
        return found, False
    kept = sorted({*numbers, *(one.made for one in steps if isinstance(one, _Fill))})
    moved, scratch = {i: (len(given) + place, 0) for place, i in enumerate(kept)}, 0
    for i, one in enumerate(made):
        if i not in moved:
            moved[i] = len(given) + len(kept), scratch
            scratch += -(-one.nbytes // _ALIGNED) * _ALIGNED
    return found, Recording(
        given[0].device,
        [(made[i].shape, made[i].dtype) for i in kept],
        scratch,
        [_moved(one, len(given), moved) for one in steps],
        [
            (kept.index(i), None if one.shape == made[i].shape else one.shape)
            for i, one in zip(numbers, returned, strict=True)
        ],
        isinstance(found, Tensor),
    )


def _moved(step: _Launch | _Fill, given: int, moved: dict[int, Place]) -> _Launch | _Fill:
    """Return a step with other places of what was allocated."""
    if isinstance(step, _Fill):
        return step._replace(made=moved[step.made][0] - given)
    places: list[tuple[int, Place]] = []
    for i, (number, offset) in step.places:
        place, begin = moved[number - given] if number >= given else (number, 0)
        places.append((i, (place, begin + offset)))
    return step._replace(places=places)


def _is_same(one: Tensor, made: Tensor) -> bool:
    """Say whether a tensor is another one, or has its elements in another shape."""
    is_alike = one.numel() == made.numel() and one.dtype == made.dtype and one.is_contiguous()
    return is_alike and not one.storage_offset() and one.untyped_storage()._cdata == made.untyped_storage()._cdata


def _step(noted: tuple[Any, ...], given: list[Tensor], made: list[Tensor], seed: int) -> _Launch | _Fill | None:
    """Return a launch or a fill with the places of its tensors; None where they are unknown."""
    if isinstance(noted[0], Tensor):
        part, value = noted
        found = _place(part, given, made)
        if found is None or found[0] < len(given) or found[1] % part.itemsize:
            return None
        whole = made[found[0] - len(given)]
        if whole.dtype != part.dtype and whole.dim() != 1:
            return None
        is_seed = type(value) is int and value == seed != 0
        offset = found[1] // part.itemsize
        return _Fill(found[0] - len(given), part.dtype, part.shape, part.stride(), offset, None if is_seed else value)
    run, before, after, names = noted
    arguments = [*before[:_STREAM], None, *before[_STREAM:], *after]
    begin, places, seeds = len(before) + 1, [], []
    for i, value in enumerate(after, begin):
        if isinstance(value, Tensor):
            found, arguments[i] = _place(value, given, made), None
            if found is not None:
                places.append((i, found))
            elif value.numel():
                return None
        elif names[i - begin].startswith("seed") and value != _GIVEN:
            seeds.append((i, value ^ seed))
    return _Launch(run, tuple(arguments), places, seeds)


def _place(tensor: Tensor, given: Sequence[Tensor], made: Sequence[Tensor]) -> Place | None:
    """Find the one tensor that another begins in, an argument that begins there too before others; or None."""
    address, every = tensor.data_ptr(), [*given, *made]
    begun = [i for i, one in enumerate(every) if one.numel() and one.data_ptr() == address]
    inside = begun or [i for i, one in enumerate(every) if 0 <= address - one.data_ptr() < _extent(one)]
    return (inside[0], address - every[inside[0]].data_ptr()) if tensor.numel() and len(inside) == 1 else None


def _extent(tensor: Tensor) -> int:
    """Return the bytes from the first to the last element."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return math.prod((last + 1, tensor.itemsize))
