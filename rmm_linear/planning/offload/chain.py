"""Offload what blocks save for the backward pass: an accelerator's to the CPU's memory, the CPU's to files.

A block's forward pass runs under ``torch.autograd.graph.saved_tensors_hooks``. Every storage that it saves is copied
out once, however many views of it are saved, and comes back for the backward pass, one block ahead. Only the time of a
step depends on that order: a tensor whose block was not fetched ahead is fetched when it is asked for.
"""

from __future__ import annotations

import functools
import os
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from rmm_linear.context.surroundings import at_end_of_backward, backward_task
from rmm_linear.planning.offload.copies import Copy, FileCopy, Files, PinnedArena, PinnedCopy, Returning, SizeCopy
from rmm_linear.planning.offload.pack import Packer, packing
from rmm_linear.planning.replay.wrapped import Wrapped


class OffloadChain:
    """The state that a model's offloaded blocks share: the folder, and the order in which they ran."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Begin without a file."""
        self.folder = None if folder is None else Path(folder)
        self.holds = True  # fake copies on the device for as long as real ones
        self._files: Files | None = None
        self._arenas: dict[torch.device, PinnedArena] = {}
        self._last: weakref.ref[_OffloadedCall] | None = None
        self._task = -1  # the backward pass that is running
        self.steps = 0  # backward passes so far
        self._back: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def __reduce__(self) -> Any:
        """Copy the folder and no more: a copied model has not run yet."""
        return OffloadChain, (self.folder,)

    def takes(self, device: torch.device) -> bool:
        """Say whether a device's memory can be copied out."""
        return device.type == "cuda" or (device.type == "cpu" and self.folder is not None)

    def takes_from(self, tensor: Tensor) -> bool:
        """Say whether a tensor can be copied out; a fake one stands for one that can."""
        return isinstance(tensor, FakeTensor) or self.takes(tensor.device)

    def copy(self, content: Tensor) -> Copy:
        """Copy bytes out, uint8 of one dimension."""
        if isinstance(content, FakeTensor):
            is_accelerated = content.device.type == "cuda" or self.folder is None
            return SizeCopy(content, is_held=is_accelerated and self.holds)
        if content.device.type == "cuda" or self.folder is None:  # then it takes nothing else
            arena = self._arenas.setdefault(content.device, PinnedArena())
            return PinnedCopy(content, arena)
        if self._files is None or not self._files.is_usable:
            self._files = Files(self.folder)
        return FileCopy(content, self._files)

    def enter(self) -> _OffloadedCall:
        """Begin a block's forward pass; the block before the last may free its memory now, as it is copied.

        So an accelerator has the memory of two blocks at most: of the one that runs, and of the last.
        """
        last = self._last() if self._last is not None else None
        before = last.before() if last is not None and last.before is not None else None
        if before is not None:
            for saved in before.alive():
                saved.copy.let_go()
        return _OffloadedCall(self, self._last)

    def leave(self, call: _OffloadedCall) -> None:
        """End a block's forward pass."""
        if call.saved:
            self._last = weakref.ref(call)

    def begin(self, task: int) -> None:
        """Note which backward pass is running, so that what it fetched and did not need is freed with it."""
        if self._task != task:
            self.end()
            self._task = task
            at_end_of_backward(functools.partial(_end, weakref.ref(self)))

    def fetched(self, saved: _Saved) -> None:
        self._back.add(saved)

    def end(self) -> None:
        """Free what is back: of a backward pass that ended, also by an error."""
        self._task = -1
        self.steps += 1
        for saved in list(self._back):
            saved.forget()
        self._back.clear()


def _end(chain: weakref.ref[OffloadChain]) -> None:
    found = chain()
    if found is not None:
        found.end()


class Offloaded(Wrapped):
    """The forward pass of a module whose saved tensors are offloaded."""

    copied = 0  # bytes, in the forward pass of the last step, which may call the module several times
    _step = 0  # which it was

    def __init__(self, module: nn.Module, chain: OffloadChain) -> None:
        """Wrap a module's forward pass. The model's offloaded blocks share the chain."""
        super().__init__(module)
        self.chain = chain

    def attach(self) -> None:
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if tensor.device.type == "cpu" and not self.chain.takes(tensor.device):
                raise ValueError(
                    f"offload puts what a block on the CPU saves into files, got {type(self.module).__name__} on the "
                    "CPU and no folder: the CPU's memory is where it would go. Give folder=... to fit, load_plan or "
                    "RMMCallback(fit={...}), offload_folder=... to convert_as_saved, or leave offload out."
                )
            if tensor.device.type != "meta" and not self.chain.takes(tensor.device):
                raise ValueError(
                    f"offload knows CUDA and the CPU, got {type(self.module).__name__} on {tensor.device}. "
                    "Leave offload out."
                )
        super().attach()

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_off or not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        call = self.chain.enter()
        with packing(Packer(self.module, self.chain.takes_from, call.save)):
            output = self.inner(*args, **kwargs)
        self.chain.leave(call)
        self.copied = call.copied + (self.copied if self._step == self.chain.steps else 0)
        self._step = self.chain.steps
        return output


class _OffloadedCall:
    """One forward pass of one block. What is saved has it, so it goes when the graph does."""

    def __init__(self, chain: OffloadChain, before: weakref.ref[_OffloadedCall] | None) -> None:
        self.chain, self.before = chain, before
        self.saved: list[weakref.ref[_Saved]] = []
        self.task, self.copied = -1, 0

    def save(self, content: Tensor) -> _Saved:
        self.copied += content.numel()
        return _Saved(self, self.chain.copy(content))

    def alive(self) -> list[_Saved]:
        return [saved for ref in self.saved if (saved := ref()) is not None]

    def begin(self, task: int) -> None:
        """Fetch this block and the one before it, if its backward pass begins."""
        if self.task == task:
            return
        self.task = task
        self.chain.begin(task)
        before = self.before() if self.before is not None else None
        for saved in (*self.alive(), *(before.alive() if before is not None else ())):
            saved.fetch()


class _Saved:
    """A storage that was copied out."""

    def __init__(self, call: _OffloadedCall, copy: Copy) -> None:
        self.call, self.copy = call, copy
        self._tensors = 0
        self._back: Returning | None = None
        self._unpacked = set[int]()
        call.saved.append(weakref.ref(self))

    def add(self) -> int:
        self._tensors += 1
        return self._tensors

    def fetch(self) -> Returning:
        back = self._back
        if back is None:
            self._back = back = self.copy.begin()
            self.call.chain.fetched(self)
        return back

    def unpack(self, number: int) -> Tensor:
        """Return the bytes for one of the tensors; after the last one of a backward pass only autograd has them."""
        task = backward_task()
        if task == -1:  # other code looks at a node of the graph
            return self.copy.begin().wait()
        self.call.begin(task)
        back = self.fetch()
        self._unpacked.add(number)
        if len(self._unpacked) == self._tensors:
            self.forget()
        return back.wait()

    def forget(self) -> None:
        self._back = None
        self._unpacked.clear()
