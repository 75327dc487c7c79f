"""Save in a simulated step, for slices that do not run, what one like them saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rmm_linear.memory.peak import LiveTensors, storages


class _SavedStreams(torch.autograd.Function):
    """Saves tensors, and does nothing else."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


def saved(tensors: Sequence[Tensor]) -> Any:
    """Save tensors as autograd does, and return the node that has them."""
    with torch.enable_grad():
        anchor = torch.empty(0, requires_grad=True)
        return _SavedStreams.apply(anchor, *(one.detach() for one in tensors)).grad_fn


class SampledSlices:
    """Notes what the slices that run save, and saves as much for those that are left out."""

    def __init__(self, more: Sequence[int], given: Sequence[Tensor], live: LiveTensors) -> None:
        """Begin before the first slice; ``more`` says how many like each one are left out after it."""
        self._more, self._live = iter(more), live.live
        self._given = {storage._cdata for storage in storages(given)}  # which slices may save too, and share
        self._device = given[0].device
        self._sizes = list[int]()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a slice inside of the block."""
        outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
        unpack: Callable[[Any], Tensor] = (lambda packed: packed) if outer is None else outer[1]
        known = dict[int, Callable[[], Any]]()

        def pack(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()
            key = storage._cdata  # another storage may have it later
            is_made = key in self._live and key not in self._given
            if is_made and known.get(key, lambda: None)() is not storage:
                known[key] = weakref.ref(storage)
                self._sizes.append(storage.nbytes())
            return tensor.detach() if outer is None else outer[0](tensor)

        self._sizes = []
        with saved_tensors_hooks(pack, unpack):
            yield

    def left_out(self) -> Iterator[Any]:
        """Save for the slices that are left out after the one that ran, and return their nodes."""
        for _ in range(next(self._more)):
            yield saved([torch.empty(size, dtype=torch.uint8, device=self._device) for size in self._sizes])
