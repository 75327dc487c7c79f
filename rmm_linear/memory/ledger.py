"""Count the bytes that each module saves for the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear._support.reports import Report
from rmm_linear._support.tables import grouped, named_table
from rmm_linear.memory.peak import has_bytes, parts, storages

StorageKey = tuple[str, int]  # device and address


def storage_key(tensor: Tensor) -> StorageKey:
    """Return what tells a tensor's storage from others that are alive; of several, the first."""
    return str(tensor.device), storages(tensor)[0].data_ptr()


@dataclass
class SavedStorage:
    """One storage that autograd saves for backward, and the modules that save it, in the order in which they did."""

    bytes: int
    modules: list[str]


class Ledger(Report):
    """Bytes that autograd saves for the backward pass, by module.

    Every distinct storage counts once, for the module that saved it first, and is marked as shared if other modules
    save it too. All figures are those of the peak of saved bytes, so a backward pass inside the block, which frees
    saved tensors, does not lower them.
    """

    def __init__(self) -> None:
        """Make an empty ledger."""
        self._live: dict[StorageKey, SavedStorage] = {}
        self._holders: dict[StorageKey, int] = {}
        self._peak: dict[StorageKey, SavedStorage] = {}

    @property
    def storages(self) -> dict[StorageKey, SavedStorage]:
        """(device, address) to storage, at the moment with the most saved bytes."""
        return max(self._live, self._peak, key=lambda saved: sum(entry.bytes for entry in saved.values()))

    @property
    def total(self) -> int:
        """Bytes of all saved storages, parameters and buffers excluded."""
        return sum(entry.bytes for entry in self.storages.values())

    @property
    def by_module(self) -> dict[str, int]:
        """Bytes by the module that saves them first, in the order of the forward pass; "" is the model itself."""
        result: dict[str, int] = {}
        for entry in self.storages.values():
            result[entry.modules[0]] = result.get(entry.modules[0], 0) + entry.bytes
        return result

    @property
    def shared(self) -> dict[str, int]:
        """The part of ``by_module`` that other modules save too, in bytes."""
        result: dict[str, int] = {}
        for entry in self.storages.values():
            if len(entry.modules) > 1:
                result[entry.modules[0]] = result.get(entry.modules[0], 0) + entry.bytes
        return result

    def to_dict(self) -> dict[str, Any]:
        """Return the ledger as plain JSON types.

        Returns:
            A dictionary with the keys total, by_module and shared, in bytes.
        """
        return {"total": self.total, "by_module": self.by_module, "shared": self.shared}

    def summary(self) -> str:
        """Return the total in one line."""
        return f"rmm_linear: saved={self.total} bytes modules={len(self.by_module)}"

    def __str__(self) -> str:
        """Return the total, and modules with the most bytes first, like ones in a row."""
        groups = grouped((one["module"], str(one["bytes"]), str(one["shared"])) for one in self._records())
        rows = [
            (name, len(names), len(names) * int(size), len(names) * int(too)) for name, names, (size, too) in groups
        ]
        return self._text(rows)

    def table(self) -> str:
        """Return the total, and a row for every module, the one with the most bytes first.

        Returns:
            Text: bytes, share of the total, and bytes that other modules save too.
        """
        return self._text([(one["module"], 1, one["bytes"], one["shared"]) for one in self._records()])

    def _text(self, rows: Sequence[tuple[str, int, int, int]]) -> str:
        found = [
            (
                name or "(model)",
                str(count) if count > 1 else "",
                f"{size:,}",
                f"{100 * size / max(self.total, 1):.1f}",
                f"{shared:,}" if shared else "",
            )
            for name, count, size, shared in sorted(rows, key=lambda row: -row[2])
        ]
        return f"{self.summary()}\n{named_table(('module', 'count', 'bytes', '%', 'shared'), found)}"

    def _records(self) -> list[dict[str, Any]]:
        shared = self.shared
        return [{"module": n, "bytes": count, "shared": shared.get(n, 0)} for n, count in self.by_module.items()]

    def _add(self, tensor: Tensor, module: str) -> StorageKey:
        key = storage_key(tensor)
        entry = self._live.setdefault(key, SavedStorage(sum(one.nbytes() for one in storages(tensor)), []))
        if module not in entry.modules:
            entry.modules.append(module)
        self._holders[key] = self._holders.get(key, 0) + 1
        return key

    def _release(self, key: StorageKey) -> None:
        self._holders[key] -= 1
        if self._holders[key] == 0:
            self._peak = dict(self.storages)
            del self._holders[key], self._live[key]


class _SavedTensor:
    """A saved tensor that tells the ledger when it is freed."""

    def __init__(self, tensor: Tensor, ledger: Ledger | None, key: StorageKey | None) -> None:
        # With its grad_fn, a saved output would hold the node that holds it: a graph that no backward pass frees.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = None if tensor.is_inference() else tensor._version
        if ledger is not None and key is not None:
            weakref.finalize(self, ledger._release, key).atexit = False

    def unpack(self) -> Tensor:
        """Return the tensor, unless it was changed since, which PyTorch does not look at where a hook has saved it."""
        with torch._C.DisableTorchFunction():  # who reads a node may let no function run
            version = self.version if self.version is None else self.tensor._version
            shape = tuple(self.tensor.shape)
        if version != self.version:
            raise RuntimeError(
                "A tensor that is needed for the backward pass was modified by an in-place operation: one of the shape "
                f"{shape} is at version {version}, expected {self.version}. Change a copy of it."
            )
        return self.tensor


@contextmanager
def track_saved(model: nn.Module) -> Iterator[Ledger]:
    """Attribute the bytes that autograd saves for the backward pass to the modules of a model.

    Works on any device, through ``torch.autograd.graph.saved_tensors_hooks``. Tensors that other such hooks inside the
    block store themselves (activation checkpointing, ``save_on_cpu``) are not counted, nor are parameters, buffers,
    fixed directions, which are kept from step to step, and tensors on the meta device, which have no bytes.

    Args:
        model: The model that runs inside the block.

    Yields:
        The ledger.

    Example:
        >>> layer = nn.Sequential(nn.Linear(4, 3))
        >>> with track_saved(layer) as saved:
        ...     _ = layer(torch.ones(10, 4))
        >>> saved.by_module  # the input, 10 × 4 × 4 bytes
        {'0': 160}
    """
    contexts = {id(found): found for one in model.modules() if (found := getattr(one, "rmm_context", None)) is not None}
    # Held, so that nothing else gets the address of a buffer that is replaced inside the block.
    own = {storage_key(one): storages(one) for each in (*model.parameters(), *model.buffers()) for one in parts(each)}
    ledger = Ledger()
    running: list[str] = []

    def pack(tensor: Tensor) -> _SavedTensor:
        if not has_bytes(tensor) or not storages(tensor)[0].nbytes() or storage_key(tensor) in own:
            return _SavedTensor(tensor, None, None)
        if any(one.basis is tensor for context in contexts.values() for one in context.directions.values()):
            return _SavedTensor(tensor, None, None)
        return _SavedTensor(tensor, ledger, ledger._add(tensor, running[-1] if running else ""))

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: running.append(name)

    def leave(*_: Any) -> None:
        running.pop()

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(enter(name), prepend=True).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, _SavedTensor.unpack))
        yield ledger
