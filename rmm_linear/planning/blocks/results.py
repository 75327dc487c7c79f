"""Save the results of some operators in a forward pass, and return them where it is run again.

They are saved as autograd's tensors are: a module that offloads what it saves offloads them too. PyTorch's selective
checkpointing keeps them on the device, and takes other random numbers after attention with dropout, whose own are
skipped; such calls are computed again here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from rmm_linear.planning.offload.pack import SavedTensor, pack


class Results:
    """The results of one forward pass, in their order."""

    def __init__(self, operators: Collection[Any]) -> None:
        """Begin without results; ``operators`` are packets such as ``torch.ops.aten.mm``."""
        self.operators = operators
        self.kept: list[tuple[Any, Any]] = []
        self.is_complete = False

    def has(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Say whether an operator's results are saved: not if it draws random numbers, which those after it need."""
        if getattr(func, "_overloadpacket", func) not in self.operators:
            return False
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        return not given.get("dropout_p")

    @contextmanager
    def saving(self) -> Iterator[None]:
        with _Saving(self):
            yield
        self.is_complete = True

    @contextmanager
    def returning(self) -> Iterator[None]:
        """Return inside of the block what the operators returned."""
        with _Returning(self):
            yield


class _Saving(TorchDispatchMode):
    def __init__(self, results: Results) -> None:
        super().__init__()
        self.results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self.results.has(func, args, kwargs):
            self.results.kept.append((func, tree_map_only(Tensor, _saved, found)))
        return found


class _Returning(TorchDispatchMode):
    def __init__(self, results: Results) -> None:
        super().__init__()
        self.results, self.place = results, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.results.has(func, args, kwargs):
            return func(*args, **(kwargs or {}))
        kept, place = self.results.kept, self.place
        known, found = kept[place] if place < len(kept) else (None, None)
        if known is not func:
            raise RuntimeError(
                f"The backward pass computes again what the forward pass computed, and comes to {func} as result "
                f"{place}, where that had {known}. A block must do the same each time."
            )
        if found is None:
            raise RuntimeError(
                "Trying to backward through a block a second time, whose saved results are freed. Use recompute, which "
                "saves none, for backward passes that retain the graph."
            )
        self.place += 1
        if self.results.is_complete:  # not in a backward pass inside of the block, which runs it once more
            kept[place] = known, None  # only the graph has it from now on
        return tree_map_only(SavedTensor, lambda packed: packed.unpack(), found)


def _saved(tensor: Tensor) -> SavedTensor:
    # Beneath autograd, a view shares the version counter of what it is of where this key is not excluded.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return pack(tensor.detach())
