"""Helpers that the launchers share."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

# A seed, int64 (1,), or the pair of such a place and of the numbers to be written there, see ``given``.
Seed = torch.Tensor | tuple[torch.Tensor, tuple[int, ...]]
_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def cdiv(number: int, by: int) -> int:
    """Divide and round up; Triton's own takes three microseconds."""
    return -(-number // by)


def precision() -> str:
    """How float32 tiles are multiplied: to float32's precision, on the matrix unit where it can."""
    return "tf32x3" if torch.version.cuda is not None else "ieee"


def is_ieee() -> bool:
    """Whether float32 tiles are multiplied in float32, where the matrix unit has no tf32."""
    return precision() == "ieee"


def product_type(dtype: torch.dtype) -> tl.dtype:
    """The dtype in which tiles of a dtype are multiplied by a matrix that every dtype holds."""
    return tl.float32 if upcast() or dtype == torch.float32 else _TYPES[dtype]


def small_type(dtype: torch.dtype) -> tl.dtype:
    """The same of what float16 holds, as normalized rows and codes: it is the more exact half type."""
    return product_type(dtype if dtype == torch.float32 else torch.float16)


def tile_rows(is_single: bool, is_heavy: bool, is_asynchronous: bool) -> int:
    """Rows of a tile that fit into registers.

    is_single: Whether inputs are float32. is_heavy: Whether a kernel packs two matrices, or has a path for short
    groups. is_asynchronous: Whether products read their matrices from shared memory, as on sm_90 and sm_100.
    """
    return 32 if (is_heavy and (is_single or not is_asynchronous)) or (is_single and not is_asynchronous) else 64


def rows_for(tensor: torch.Tensor, dtype: torch.dtype, is_heavy: bool) -> int:
    """See tile_rows; ``tensor`` lies on the device."""
    return tile_rows(dtype == torch.float32, is_heavy, is_asynchronous(tensor))


def is_asynchronous(tensor: torch.Tensor) -> bool:
    """Whether products on the device of a tensor read their matrices from shared memory."""
    return tensor.is_cuda and _is_asynchronous(tensor.device.index)


@functools.cache
def _is_asynchronous(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index)[0] in (9, 10)


def upcast() -> bool:
    """Whether half types are multiplied in float32: Triton's interpreter multiplies bfloat16 wrongly."""
    return not isinstance(_nothing, triton.JITFunction)


@triton.jit
def _nothing():
    pass


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """Launch a kernel on the device of its first argument.

    Triton takes some 15 microseconds of Python to find the compiled kernel for its arguments. Here it is found by what
    it is compiled for: dtypes, which pointers are aligned, the numbers that are specialised, and the constants.

    Args:
        kernel: What ``triton.jit`` made.
        grid: Programs in each dimension.
        arguments: Tensors, numbers and None for all but the constants, in the kernel's order.
        num_warps: Warps of a program.
        constants: Its ``tl.constexpr``, in the kernel's order.
    """
    index = _index(arguments[0])
    if index is None or not isinstance(kernel, triton.JITFunction):
        with _on(arguments[0].device):
            kernel[grid](*arguments, **constants, num_warps=num_warps)
        return
    types = (*map(type, arguments),)
    tensors, numbers, free, plans = _layouts.get((id(kernel), types)) or _layout(kernel, types)
    pointers = [arguments[i].data_ptr() for i in tensors]
    found = (
        index, num_warps, *constants.values(), *[arguments[i].dtype for i in tensors], *[p % 16 == 0 for p in pointers],
        *[arguments[i] for i in numbers], *[-_LAST <= arguments[i] < _LAST for i in free],
    )  # fmt: skip
    plan = None if _has_hooks() else plans.get(found)
    noted = _thread.launches
    if plan is not None and noted is None and torch._C._cuda_getDevice() == index:
        run, function, metadata, last = plan
        values, stream = [*arguments], torch._C._cuda_getCurrentRawStream(index)
        for i, pointer in zip(tensors, pointers, strict=True):  # of a tensor, Triton would ask the driver
            values[i] = pointer
        run(*grid, *(1,) * (3 - len(grid)), stream, function, metadata, None, None, None, *values, *last)
        return
    names = kernel.arg_names[len(arguments) :]
    if names != [*constants]:
        raise TypeError(f"{kernel.__name__} must get its constants in their order, {names}, got {[*constants]}.")
    with _on(arguments[0].device):
        compiled = kernel[grid](*arguments, **constants, num_warps=num_warps)
    plans[found] = compiled.run, compiled.function, compiled.packed_metadata, tuple(constants.values())
    if noted is not None:
        before = *grid, *(1,) * (3 - len(grid)), compiled.function, compiled.packed_metadata, None, None, None
        noted.append((compiled.run, before, (*arguments, *constants.values()), kernel.arg_names))


_LAST = 2**31  # beyond it, a number has more than 32 bits


class _Thread(threading.local):
    """What a thread does: the launches that it has noted, None where nothing asks for them."""

    launches: list[Any] | None = None


_thread = _Thread()


@contextlib.contextmanager
def recorded() -> Iterator[list[Any]]:
    """Note the launches of this thread inside of the block.

    Of each what to run, the grid with what is behind the stream, arguments and constants, and the names of these.
    """
    before, noted = _thread.launches, []
    _thread.launches = noted
    try:
        yield noted
    finally:
        _thread.launches = before


def can_launch(index: int) -> bool:
    """Whether what was launched before may be launched on a device again, as it is: Triton looks at nothing else."""
    return torch.version.hip is None and torch._C._cuda_getDevice() == index and not _has_hooks()


class _Layout(NamedTuple):
    """Where a kernel has its arguments of some types.

    Attributes:
        tensors: Places of tensors.
        numbers: Of integers that kernels are compiled for.
        free: Of other integers.
        plans: What was compiled, by what it was compiled for.
    """

    tensors: list[int]
    numbers: list[int]
    free: list[int]
    plans: dict[tuple[Any, ...], tuple[Any, ...]]


_layouts: dict[tuple[int, tuple[type, ...]], _Layout] = {}  # by a kernel's id
_kernels: set[Any] = set()  # which these are of


def _layout(kernel: Any, types: tuple[type, ...]) -> _Layout:
    is_free = [parameter.do_not_specialize for parameter in kernel.params[: len(types)]]
    integers = [i for i, kind in enumerate(types) if issubclass(kind, int)]
    made = _Layout(
        [i for i, kind in enumerate(types) if issubclass(kind, torch.Tensor)],
        [i for i in integers if not is_free[i]],
        [i for i in integers if is_free[i]],
        {},
    )
    _kernels.add(kernel)
    _layouts[id(kernel), types] = made
    return made


def _index(tensor: torch.Tensor) -> int | None:
    """The number of a CUDA device; None of another one, and on AMD, where compilers ask for more than the key has."""
    return tensor.get_device() if tensor.is_cuda and torch.version.hip is None else None


def _has_hooks() -> bool:
    """Whether a profiler wants to see launches."""
    runtime = triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a device the current one: Triton launches there."""
    return contextlib.nullcontext() if device.type == "cpu" else getattr(torch, device.type).device(device)


def given(seed: Any, is_launched: bool, count: int = 1) -> tuple[Any, ...]:
    """The place of seeds, their numbers, and to how many places the last of these is written; 0 if they are there.

    A launch that does nothing but write a seed takes as long as one that does more, so kernels write theirs.

    Args:
        seed: int64, shape (count,), or None; or a pair of that tensor, which may have places behind that the last
            number fills up, and the numbers.
        is_launched: Whether a kernel is launched, which writes them; if not, PyTorch does.
        count: How many seeds there are.
    """
    if seed is None or isinstance(seed, torch.Tensor):
        return seed, *[_LAST] * count, 0  # a number of 64 bits, as almost all seeds are: for one kernel
    place, numbers = seed
    for i, number in enumerate(() if is_launched else numbers):
        place[i:].fill_(number)
    return place, *numbers, len(place) - count + 1


def places(index: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """For each of ``rows`` rows its place in an index of distinct rows, −1 where it has none; None without an index."""
    if index is None:
        return None
    place = torch.full((rows,), -1, dtype=torch.int64, device=index.device)
    place[index] = torch.arange(index.shape[0], device=index.device)
    return place
