"""Measure the peak memory of a block of code."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from rmm_linear._support.reports import Report
from rmm_linear._support.sizes import show_bytes
from rmm_linear._support.tables import keyed, named_table

# Fake tensors ask for their device by an operator: more often than for results.
_DEVICE = torch.ops.prim.device.default
_SHOWN = 8  # modules of a peak that is printed in short


@dataclass(repr=False)
class Peak(Report):
    """The result of :func:`peak`.

    Attributes:
        bytes: Peak memory.
        measure: "cuda allocated", "cpu live tensors", or "simulated live tensors".
        moment: When, if the modules were followed: "forward of encoder.layer.0", "backward of ...".
        by_module: Bytes that live at that moment, by the module that made them, if the modules were followed; "" is
            the model itself.
        timeline: Live bytes after every allocation and release, and the moment of each, if the modules were followed.
    """

    bytes: int = 0
    measure: str = "cpu live tensors"
    moment: str = ""
    by_module: dict[str, int] = field(default_factory=dict)
    timeline: list[tuple[int, str]] = field(default_factory=list)

    def summary(self) -> str:
        """Return the peak, and when it is, in one line, or two of 100 columns."""
        moment = (f"in the {self.moment}",) if self.moment else ()
        return keyed("rmm_linear:", (f"peak={show_bytes(self.bytes)}", f"({self.measure})", *moment))

    def __str__(self) -> str:
        return self._text(_SHOWN)

    def table(self) -> str:
        """Return the bytes that live at the peak, by the module that made them.

        Returns:
            Text.
        """
        return self._text(len(self.by_module))

    def _text(self, most: int) -> str:
        found = sorted(self._records(), key=lambda row: -row["bytes"])
        rows = [(row["module"], f"{row['bytes']:,}", f"{100 * row['bytes'] / max(self.bytes, 1):.1f}") for row in found]
        if len(rows) > most + 1:
            count = sum(row["bytes"] for row in found[most:])
            less = (f"{len(rows) - most} more, see table()", f"{count:,}", f"{100 * count / max(self.bytes, 1):.1f}")
            rows = [*rows[:most], less]
        lines = [named_table(("made by", "bytes", "% of the peak"), rows)] if rows else []
        return "\n".join([self.summary(), *lines])

    def _records(self) -> list[dict[str, Any]]:
        return [{"module": name, "bytes": count} for name, count in self.by_module.items()]


class LiveTensors(TorchDispatchMode):
    """Adds up the bytes of the live storages that operators returned.

    Tensors on the meta device have none. Fake tensors count as if they were on the device that they name, although
    their storages are on the meta device.
    """

    def __init__(self, result: Peak, *, counts_meta: bool = False) -> None:
        """Count into a result, which has the peak so far at any time.

        ``counts_meta`` says that tensors on the meta device replace real ones and count too.
        """
        super().__init__()
        self.result = result
        self.counts_meta = counts_meta
        self.live: dict[int, int] = {}
        self.now = 0

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
        found = [storage for storage in storages(counted) if storage._cdata not in self.live]
        inputs = {storage._cdata for storage in storages((args, kwargs))} if found else set[int]()
        for storage in found:
            if storage._cdata not in inputs:  # results written into an argument allocate nothing
                self._add(storage)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.live:
            return
        self.live[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.result.bytes = max(self.result.bytes, self.now)
        weakref.finalize(storage, self._release, key).atexit = False

    def _release(self, key: int) -> None:
        self.now -= self.live.pop(key)


def has_bytes(leaf: Any) -> bool:
    """Say whether something is a tensor with memory, or a fake one that represents such a tensor.

    The device of a tensor decides: that of its storage is meta for fake ones too.
    """
    return isinstance(leaf, Tensor) and leaf.device.type != "meta"


def storages(tree: Any) -> list[torch.UntypedStorage]:
    """Return the storages of the tensors in nested arguments; of a tensor that consists of others, of these."""
    found = [inner for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) for inner in parts(leaf)]
    return [tensor.untyped_storage() for tensor in found if tensor.layout == torch.strided]


def parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor consists of: those inside of a subclass, or itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in parts(getattr(tensor, name))]


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
