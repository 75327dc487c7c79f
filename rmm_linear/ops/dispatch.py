"""The table of operations: their implementations, and the operators by which PyTorch knows them.

An :class:`Operation` is a row: a definition in plain PyTorch, and maybe faster ones in C and in Triton.
An :class:`Operator` is what a layer calls, and is composed of operations. PyTorch's dispatcher takes some fifty
microseconds for an operator in Python, more than a small layer, so eager code calls the function itself where nothing
would notice. What needs the operator is a compiler, a mode that sees every operator (fake tensors, selective
checkpointing, counters of operations), a profiler, and tensors that are more than memory.

Both are enumerated, with samples of their arguments, and tests/contracts/test_operations.py tries all of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from rmm_linear._support.autocast import is_autocast
from rmm_linear.backends.select import ENVIRONMENT, SETTING, backend_of, backends_of
from rmm_linear.backends.triton import DTYPES, was_tried
from rmm_linear.ops.repeat import Repeated
from rmm_linear.sketches import RowSample, TokenMask
from rmm_linear.sketches.seeds import Fresh, written
from rmm_linear.spec import SaveSpec

# float32 and the half types, all that the C library and the kernels read; float64 where it is converted for them.
NARROW = frozenset(DTYPES)
FLOATS = NARROW | {torch.float64}
_READ = NARROW | {torch.uint8}  # or stored bytes
_NO_TENSORS = {type(None), int, float, bool, str, torch.dtype, SaveSpec}
_has_gradients, _dispatch_modes = torch.is_grad_enabled, torch._C._len_torch_dispatch_stack
_profiled = torch._C._autograd._profiler_enabled  # pyright: ignore[reportAttributeAccessIssue]
_stack = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]


TAKES_TAGS = "tags" in inspect.signature(torch.library.custom_op).parameters  # not all versions of PyTorch do


class Call(NamedTuple):
    """Arguments of one call."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]


def call(*arguments: Any, **named: Any) -> Call:
    """Return arguments as they are written in a call."""
    return Call(arguments, named)


@dataclass(frozen=True)
class Case:
    """A description from which samples of arguments are made."""

    rows: int = 6
    columns: int = 70
    dtype: torch.dtype = torch.float32
    taken: str = "all"  # which rows are valid or stored: "all" without an index, "listed" by one, "some" or "none"
    # How a matrix lies in memory: "rows", or a view of a larger one: "columns", "steps" or "transposed"
    layout: str = "rows"
    seed: int | None = 7  # seed of operators that draw one themselves for None

    def matrix(self, number: int = 0, columns: int | None = None) -> Tensor:
        """Return normal numbers, shape (rows, columns), others for another number."""
        rows, columns = self.rows, self.columns if columns is None else columns
        steps, margin = (2, 0) if self.layout == "steps" else (1, 5 if self.layout == "columns" else 0)
        generator = torch.Generator().manual_seed(number)
        whole = torch.randn(rows * steps, columns + margin, generator=generator, dtype=torch.float64).to(self.dtype)
        whole = whole.T.contiguous().T if self.layout == "transposed" else whole
        return whole[::steps, margin:]

    def vector(self, number: int = 0) -> Tensor:
        """Return one number for every column, about 1."""
        return 1 + self.matrix(number + 100)[:1].sum(0) / 4

    @property
    def seeds(self) -> Tensor:
        """One seed, int64, shape (1,)."""
        return torch.tensor([-123456789012345678])

    @property
    def index(self) -> Tensor | None:
        """The rows that are stored, int64, in another order than in the matrix."""
        listed = torch.arange(self.rows).flip(0)
        return {"all": None, "listed": listed, "some": listed[1::2], "none": listed[:0]}[self.taken]

    @property
    def mask(self) -> TokenMask | None:
        listed = torch.zeros(self.rows)
        return None if self.index is None else TokenMask.of(listed.index_fill_(0, self.index, 1))


Samples = Callable[[Case], Iterator[Call]]


@dataclass(frozen=True)
class Operation:
    """A row of the table."""

    name: str
    plain: Callable[..., Any]  # in plain PyTorch: the definition, for all dtypes and devices
    native: Callable[..., Any] | None = None  # with the C library, on CPU; None uses plain
    triton: Callable[..., Any] | None = None  # with the Triton kernels; None uses plain
    samples: Samples = lambda case: iter(())  # arguments of calls that together show what it takes
    # Floating dtypes that native takes, of the first tensor and where a dtype is an argument
    native_dtypes: frozenset[torch.dtype] = NARROW
    triton_dtypes: frozenset[torch.dtype] = NARROW
    # The share of codes that may be another number in native or triton, because a value on the edge of a step falls to
    # either side of it; 0 for none
    moved: float = 0.0
    error: float = 1e-5  # the relative error that native and triton may have in float32, by another order of sums
    # Whether every implementation rounds sums to a half type before it packs them; the kernels that make a sketch and
    # pack it do not
    rounds_sums: bool = True
    # Whether a row of what it makes follows from the same row of the tensors it is given, and from no other
    by_row: bool = True
    _chosen: dict[tuple[Any, ...], Callable[..., Any]] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the implementation for device and dtype of the first tensor, and for the first dtype among the arguments.

        Seeds that are not in their place yet are written for all but the kernels, which write them themselves.
        """
        first = dtype = None
        is_fresh = False
        is_transformed = _stack() is not None
        for value in (*arguments, *named.values()) if named else arguments:
            kind = type(value)
            if kind is Tensor:
                if value.is_neg() or (is_transformed and _is_wrapped(value)):
                    return self.plain(*map(written, arguments), **_written(named))  # memory does not hold its values
                if first is None:
                    first = value
            elif kind is torch.dtype:
                dtype = dtype or value
            elif kind is Fresh:
                is_fresh = True
            elif kind not in _NO_TENSORS and isinstance(value, Tensor):
                return self.plain(*map(written, arguments), **_written(named))
        if first is None:
            raise TypeError("An operation takes at least one tensor, got none.")
        key = first.device.type, first.dtype, dtype, ENVIRONMENT.get(SETTING)
        run = self._chosen.get(key) or self._choose(key)
        if is_fresh and run is not self.triton:
            return run(*map(written, arguments), **_written(named))
        return run(*arguments, **named)

    def _choose(self, key: tuple[Any, ...]) -> Callable[..., Any]:
        device, *dtypes, _ = key
        found = self.implementation(device, *(dtype for dtype in dtypes if dtype is not None))
        if found is not self.triton or was_tried(device):  # on CPU, which asks for the interpreter every time
            self._chosen[key] = found
        return found

    def implementation(self, device: str, *dtypes: torch.dtype) -> Callable[..., Any]:
        takes = {"native": self.native_dtypes, "triton": self.triton_dtypes}
        for backend in backends_of(device):
            found = getattr(self, backend)
            if found is not None and all(
                backend == "plain" or dtype in takes[backend] or not dtype.is_floating_point for dtype in dtypes
            ):
                return found
        return self.plain


def _written(named: dict[str, Any]) -> dict[str, Any]:
    return {name: written(value) for name, value in named.items()}


class Operator:
    """An operator in the namespace ``rmm_linear``, and the function that eager code calls in its place.

    Attributes:
        function: The function, with the arguments that callers have.
        definition: The operator, with the arguments that a schema can have.
        flatten: Converts the former to the latter; None if they are the same.
        samples: As for :class:`Operation`, arguments of the function.
        flops: Operations that a call takes, a function of the flat arguments with shapes in place of tensors.
        workspace: Bytes that a call takes beyond its results on an accelerator, a function of the flat arguments; None
            for operators that take little.
        native: Does what ``function`` does, in as few calls as possible, where the C library does its operations, for
            tensors on CPU in float32 and half types, or stored bytes. Where it is None or returns NotImplemented,
            ``function`` runs.
        repeated: Repeats the launches of ``function`` on CUDA; None where it does more than to launch kernels of ours.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        schema: str | None = None,
        *,
        samples: Samples = lambda case: iter(()),
        flops: Callable[..., int] | None = None,
        workspace: Callable[..., int] | None = None,
        flatten: Callable[..., tuple[Any, ...]] | None = None,
        registered: Callable[..., Any] | None = None,
        native: Callable[..., Any] | None = None,
        is_repeated: bool = False,
        tags: Sequence[str] = (),
    ) -> None:
        """Register the operator; the attributes say what the arguments are.

        ``function`` changes none of its arguments and returns none of their memory. ``registered`` is what the operator
        runs, with ``function`` and the flat arguments; None runs ``function``. ``tags`` are names of ``torch.Tag``, of
        which compilers take those that the version of PyTorch knows.
        """
        self.name, self.function, self.flatten, self.samples, self.flops = name, function, flatten, samples, flops
        self.native, self.workspace = native, workspace
        self.repeated = Repeated(function) if is_repeated else None
        self._settings: dict[Any, bool] = {}  # whether the C library runs on CPU, by the environment variable
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        run = function if registered is None else lambda *flat, **named: registered(function, *flat, **named)
        known = [getattr(torch.Tag, tag) for tag in tags if TAKES_TAGS and hasattr(torch.Tag, tag)]
        named = {"tags": known} if known else {}
        self.definition = torch.library.custom_op(f"rmm_linear::{name}", run, mutates_args=(), schema=schema, **named)
        self.register_fake = self.definition.register_fake
        if flops is not None:
            packet = self.definition._opoverload.overloadpacket
            register_flop_formula(packet)(lambda *shapes, out_shape=None, **named: flops(*shapes, **named))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the function, as an operator where something may see it as one."""
        if _is_unseen(arguments):
            return self.run(*arguments, **named)
        if self.flatten is not None:
            return self.definition(*self.flatten(*arguments, **named))
        return self.definition(*arguments, **named)

    def run(self, *arguments: Any, **named: Any) -> Any:
        """Run the function where nothing sees it; arguments are as in a call.

        Memory holds the values of all tensors: no subclasses, nor wrapped or lazily negated ones, and none by name.
        """
        first = arguments[0]
        if self.native is not None and first.is_cpu and first.dtype in _READ:
            setting = ENVIRONMENT.get(SETTING)
            if setting not in self._settings:
                self._settings[setting] = backends_of("cpu")[0] == "native"
            if self._settings[setting]:
                found = self.native(*arguments, **named)
                if found is not NotImplemented:
                    return found
        if self.repeated is not None and not named:
            return self.repeated(*arguments)
        return self.function(*arguments, **named)


Row = TypeVar("Row")
OPERATIONS: dict[str, Operation] = {}
OPERATORS: dict[str, Operator] = {}


def operation(name: str, plain: Callable[..., Any], *implementations: Any, **how: Any) -> Operation:
    """Add a row to the table: see :class:`Operation`."""
    return _add(OPERATIONS, name, Operation(name, plain, *implementations, **how))


def operator(name: str, schema: str | None = None, **how: Any) -> Callable[[Callable[..., Any]], Operator]:
    """Return a decorator that makes an operator of a function: see :class:`Operator`."""
    return lambda function: _add(OPERATORS, name, Operator(name, function, schema, **how))


def _add(table: dict[str, Row], name: str, row: Row) -> Row:
    if name in table:
        raise ValueError(f"There is an operation {name!r} already. Choose another name.")
    table[name] = row
    return row


def into(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make of an implementation that returns new tensors one that also writes them into given ones, ``out``."""

    @functools.wraps(function)
    def run(*arguments: Any, out: Sequence[Any] | None = None, **named: Any) -> Any:
        made = function(*arguments, **named)
        return made if out is None else _copy(out, made)

    return run


def _copy(places: Any, made: Any) -> Any:
    """Copy tensors, or sequences of them and of None, to those in their places."""
    if isinstance(made, Tensor):
        return places.copy_(made)
    for place, one in zip(places, made, strict=True) if made is not None else ():
        _copy(place, one)
    return places


def runs_fused(x: Tensor, is_composed: bool) -> bool:
    """Say whether an output is to be made in the pass that packs: where Triton's kernels run, and its dtype is known.

    Fused operators compute what a module computes, in float32, and store what the others store for the same seed. An
    output of the kernels is within 16 · 2⁻²⁴ · max(|x|, |g(x)|) of the function's value, and half a last bit of its
    dtype, but not PyTorch's own to the bit. So modules call them where ``RMMConfig.fused`` asks for it, and elsewhere
    one pass in PyTorch would be no faster than two.

    is_composed: Whether the module runs several functions, to which autocast may give different dtypes.
    """
    if not _has_kernels(x.device.type, x.dtype) or (is_composed and is_autocast(x.device.type)):
        return False
    return torch.compiler.is_compiling() or _is_plain(x)


def is_read(x: Tensor) -> bool:
    """Say whether the C library or Triton's kernels read a tensor: eager code, one of their dtypes, its own memory."""
    if torch.compiler.is_compiling() or x.dtype not in NARROW or not _is_plain(x):
        return False
    return _is_more_than_plain(x.device.type, ENVIRONMENT.get(SETTING))


@functools.lru_cache(maxsize=16)
def _is_more_than_plain(device: str, setting: Any) -> bool:
    """Say whether a device has more than plain PyTorch; ``setting`` is what the environment variable was."""
    return backends_of(device)[0] != "plain"


@torch.compiler.assume_constant_result
def _has_kernels(device: str, dtype: torch.dtype) -> bool:
    return backend_of(device, dtype) == "triton"


def _is_plain(tensor: Tensor) -> bool:
    """Say whether memory holds a tensor's values: it is no subclass, not lazily negated, not inside of vmap or grad."""
    return type(tensor) is Tensor and not tensor.is_neg() and not _is_wrapped(tensor)


def _is_unseen(arguments: tuple[Any, ...]) -> bool:
    if torch.compiler.is_compiling() or _has_gradients() or _dispatch_modes() or _stack() is not None or _profiled():
        return False
    return _are_memory(arguments)


def _are_memory(arguments: tuple[Any, ...]) -> bool:
    """Say whether memory holds the values of all tensors among the arguments."""
    for value in arguments:
        kind = type(value)
        if kind is Tensor or kind is nn.Parameter:
            if value.is_neg() or value._is_zerotensor():  # the latter has no memory
                return False
        elif kind not in _NO_TENSORS and not _holds_memory(value):
            return False
    return True


def _holds_memory(value: Any) -> bool:
    if isinstance(value, TokenMask):
        return _are_memory((value.order, value.count))
    return not isinstance(value, Tensor) and (not isinstance(value, RowSample) or _are_memory(value))
