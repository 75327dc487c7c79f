"""Measure the peak memory of a block of code."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from rmm_linear._support.reports import Report
from rmm_linear._support.sizes import show_bytes
from rmm_linear._support.tables import grouped, keyed, named_table, wrapped

# Fake tensors ask for their device by an operator: more often than for results.
_DEVICE = torch.ops.prim.device.default
_SHOWN, _LARGEST = 8, 5  # rows of a peak that is printed in short, and tensors that are named one by one
SAVED, RECOMPUTED, GRADIENTS, TEMPORARY = "saved", "recomputed", "gradients", "temporary"


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that is alive at the peak of a step.

    Attributes:
        bytes: Of its storage.
        module: The module that made it; "" is the model itself.
        module_class: The class of that module.
        operation: The operator that made it, such as "mm".
        kind: "saved", made in the forward pass and there when the backward pass begins; "recomputed", by a checkpoint
            in the backward pass; "gradients", of parameters; otherwise "temporary".
        shape: As it was made.
        dtype: Such as "bfloat16".
    """

    bytes: int
    module: str = ""
    module_class: str = ""
    operation: str = ""
    kind: str = TEMPORARY
    shape: tuple[int, ...] = ()
    dtype: str = ""

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{show_bytes(self.bytes)}, {self.dtype} {self.shape}: {self.kind}, made by {self.operation}{where}"


@dataclass(repr=False)
class Peak(Report):
    """The result of :func:`peak`.

    Attributes:
        bytes: Peak memory.
        measure: "cuda allocated", "cpu live tensors", or "simulated live tensors".
        moment: When, if the modules were followed: "forward of encoder.layer.0", "backward of ...".
        alive: The tensors that live at that moment, in the order in which they were made, if the modules were followed.
        timeline: Live bytes after every allocation and release, and the moment of each, if the modules were followed.
    """

    bytes: int = 0
    measure: str = "cpu live tensors"
    moment: str = ""
    alive: Sequence[LiveTensor] = ()
    timeline: list[tuple[int, str]] = field(default_factory=list)

    @property
    def by_module(self) -> dict[str, int]:
        """Bytes that live at the peak, by the module that made them; "" is the model itself."""
        return _summed((one.module, one.bytes) for one in self.alive)

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes that live at the peak, by the kind of tensor, as :class:`LiveTensor` has it."""
        return _summed((one.kind, one.bytes) for one in self.alive)

    @property
    def largest(self) -> list[LiveTensor]:
        """The five largest tensors that live at the peak, the largest first."""
        return sorted(self.alive, key=lambda one: -one.bytes)[:_LARGEST]

    @property
    def by_pass(self) -> dict[str, tuple[int, str]]:
        """Pass ("forward", "backward", "recomputation") to its own peak in bytes, and the module where that is."""
        found: dict[str, tuple[int, str]] = {}
        for size, moment in self.timeline:
            name, _, module = moment.partition(" of ")
            if size > found.get(name, (-1, ""))[0]:
                found[name] = size, module
        return found

    def summary(self) -> str:
        """Return the peak, and when it is, in one line, or two of 100 columns."""
        moment = (f"in the {self.moment}",) if self.moment else ()
        return keyed("rmm_linear:", (f"peak={show_bytes(self.bytes)}", f"({self.measure})", *moment))

    def _text(self, *, is_whole: bool) -> str:
        return "\n\n".join([self.summary(), *([self.live_table(is_whole=is_whole)] if self.alive else [])])

    def live_table(self, *, is_whole: bool = True) -> str:
        """Return what lives at the peak, by the modules and operators that made it, and the largest tensors.

        Args:
            is_whole: Whether all rows are shown, or those that have the most bytes.

        Returns:
            Text.
        """
        parts = [
            (one["module"], one["class"], one["operation"], one["kind"], str(one["bytes"])) for one in self._records()
        ]
        rows = [(name, *cells[:-1], len(names) * int(cells[-1])) for name, names, cells in grouped(parts)]
        rows.sort(key=lambda row: -row[-1])
        shown = len(rows) if is_whole or len(rows) <= _SHOWN + 1 else _SHOWN
        cells = [(*row[:-1], show_bytes(row[-1]), f"{100 * row[-1] / max(self.bytes, 1):.1f}") for row in rows[:shown]]
        laid_out = [named_table(("made by", "class", "operation", "kind", "bytes", "%"), cells)]
        if left := sum(row[-1] for row in rows[shown:]):
            laid_out.append(f"And {len(rows) - shown} more rows of {show_bytes(left)} together, see table().")
        lines = [wrapped(f"{place}. {one}", 3) for place, one in enumerate(self.largest, 1)]
        return "\n".join([*laid_out, "", "The largest tensors:", *lines])

    def _records(self) -> list[dict[str, Any]]:
        names = ("module", "class", "operation", "kind")
        found = _summed(((one.module, one.module_class, one.operation, one.kind), one.bytes) for one in self.alive)
        return [{**dict(zip(names, key, strict=True)), "bytes": size} for key, size in found.items()]

    def to_dict(self) -> dict[str, Any]:
        """Return the peak as plain JSON types, without the timeline.

        Returns:
            bytes, measure and moment; passes: the peak of each pass, with its module; by_kind, by_module: bytes at the
            peak; alive: the same by module, class, operation and kind; largest: tensors one by one.
        """
        return {
            "bytes": self.bytes,
            "measure": self.measure,
            "moment": self.moment,
            "passes": {name: {"bytes": size, "module": module} for name, (size, module) in self.by_pass.items()},
            "by_kind": self.by_kind,
            "by_module": self.by_module,
            "alive": self._records(),
            "largest": [{**asdict(one), "shape": [*one.shape]} for one in self.largest],
        }


def _summed(parts: Iterable[tuple[Any, int]]) -> dict[Any, int]:
    found = Counter[Any]()
    for key, size in parts:
        found[key] += size
    return dict(found)


class LiveTensors(TorchDispatchMode):
    """Adds up the bytes of the live storages that operators returned, and of those that are resized, as FSDP does.

    Tensors on the meta device have none. Fake tensors count as if they were on the device that they name, although
    their storages are on the meta device.
    """

    def __init__(self, result: Peak, *, counts_meta: bool = False) -> None:
        """Count into a result, which has the peak so far at any time."""
        super().__init__()
        self.result = result
        self.counts_meta = counts_meta
        self._restores: list[Callable[[], None]] = []
        self.live: dict[int, int] = {}
        self.now = 0

    def __enter__(self) -> Any:
        kind, resize = torch.UntypedStorage, torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> None:
            before = storage.nbytes()
            resize(storage, size)
            self._resized(storage, storage.nbytes() - before)

        # It is no operator, and FSDP frees and takes the memory of gathered weights by it.
        self._restores.append(partial(setattr, kind, "resize_", resize))
        kind.resize_ = resized  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._restores.pop()()
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = getattr(args[0], "fake_device", None) if func is _DEVICE else None
        if device is not None:
            return device
        if consists_of_others(types):
            return NotImplemented  # its own operators are seen instead
        output = func(*args, **(kwargs or {}))
        self._see(func, args, kwargs, output)
        return output

    def _see(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Count what an operator returned."""
        if func.is_view or func is _DEVICE:  # of a constant, fake tensors make a storage that no operator has returned
            return
        leaves = tree_leaves(output)
        counted = leaves if self.counts_meta else [leaf for leaf in leaves if has_bytes(leaf)]
        new = [(part, store) for part in strided(counted) if (store := part.untyped_storage())._cdata not in self.live]
        inputs = {storage._cdata for storage in storages((args, kwargs))} if new else set[int]()
        for part, storage in new:
            # Results written into an argument allocate nothing, and two may share a storage.
            if storage._cdata not in inputs and storage._cdata not in self.live:
                self._add(storage, part, func)

    def _add(self, storage: torch.UntypedStorage, tensor: Tensor, func: Any) -> None:
        key = storage._cdata
        self.live[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.result.bytes = max(self.result.bytes, self.now)
        weakref.finalize(storage, self._release, key).atexit = False

    def _resized(self, storage: torch.UntypedStorage, change: int) -> None:
        """Count the change; of a storage that was there before, what it adds, which may be negative."""
        key = storage._cdata
        if key not in self.live:
            self.live[key] = 0
            weakref.finalize(storage, self._release, key).atexit = False
        self.live[key] += change
        self.now += change
        self.result.bytes = max(self.result.bytes, self.now)

    def _release(self, key: int) -> None:
        self.now -= self.live.pop(key)


def has_bytes(leaf: Any) -> bool:
    """Say whether something is a tensor with memory, or a fake one that represents such a tensor."""
    return isinstance(leaf, Tensor) and leaf.device.type != "meta"


def storages(tree: Any) -> list[torch.UntypedStorage]:
    """Return the storages of the tensors in nested arguments; of a tensor that consists of others, of these."""
    return [tensor.untyped_storage() for tensor in strided(tree)]


def strided(tree: Any) -> list[Tensor]:
    """Return the plain tensors with a storage in nested arguments."""
    found = [inner for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) for inner in parts(leaf)]
    return [tensor for tensor in found if tensor.layout == torch.strided]


def parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor consists of: those inside of a subclass, or itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inner = [getattr(tensor, name) for name in names]  # of a distributed one also its mesh
    return [part for one in inner if isinstance(one, Tensor) for part in parts(one)]


def consists_of_others(types: Iterable[type]) -> bool:
    """Say whether a tensor subclass is among types whose tensors are made of others, such as quantized ones."""
    return any(issubclass(kind, Tensor) and hasattr(kind, "__tensor_flatten__") for kind in types)


@contextmanager
def peak(device: torch.device | str | None = None) -> Iterator[Peak]:
    """Measure the peak memory of a block.

    On CUDA this is the allocator's peak, including everything that was allocated before. The CPU has no such counter:
    there it is the peak of the bytes of tensors made inside the block. Unlike the resident set size (RSS) of the
    process, which hardly ever falls, it excludes the interpreter, the libraries, buffers inside an operator and memory
    that the allocator holds back. On the CPU the block runs slower, because every operator is intercepted.

    Args:
        device: The device to measure; None is CUDA if available, else the CPU.

    Yields:
        The result, complete when the block has ended.

    Example:
        >>> with peak("cpu") as measured:
        ...     _ = torch.ones(1000).add(1).sum()
        >>> measured.bytes  # two vectors at once, and no third
        8000
    """
    kind = torch.device(device).type if device is not None else ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        result = Peak(measure="cuda allocated")
        torch.cuda.reset_peak_memory_stats(device)
        try:
            yield result
        finally:
            torch.cuda.synchronize(device)
            result.bytes = torch.cuda.max_memory_allocated(device)
    else:
        result = Peak()
        with LiveTensors(result):
            yield result
