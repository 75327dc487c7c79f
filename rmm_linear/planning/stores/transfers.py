"""Puts and gets on a thread, so that a step waits for neither: with a limit, a count of the waiting, and one error.

A put that a step had to wait for would delay it, and puts without a limit would fill the memory that the store is there
to save. So at most ``IN_FLIGHT`` states are on their way; one more waits until the oldest has arrived, and the seconds
of that are counted.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import queue
import threading
import time
import uuid
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor

from rmm_linear.planning.stores.base import Store, StoreError, named

_logger = logging.getLogger(__name__)

IN_FLIGHT = 2  # one that is being written, and one that is ready when it is done
_LOOK = 0.2  # seconds after which to look whether the thread is alive
_PATIENCE = 10.0  # seconds for each thing that the thread has to do before it stops


class Transfers:
    """The states of one sweep on their way to a store and back, with the seconds that the caller waited for them."""

    def __init__(self, store: Store, *, owned: bool) -> None:
        self.waited, self.count, self.bytes, self.reads = 0.0, 0, 0, 0
        self._store, self._worker = store, _Worker()
        self._run = f"sweep-{uuid.uuid4().hex[:12]}"
        self._puts: deque[tuple[int, Future[Any]]] = deque()
        self._gets: dict[int, Future[Any]] = {}
        self._stored: dict[int, list[Any]] = {}  # what must come back: dtype, shape and device of every tensor
        self._order: list[int] = []  # the same steps, sorted
        self._held: dict[str, bool] = {}  # keys that the store may have, and whether their put has ended
        self._finalizer = weakref.finalize(self, _close, self._worker, store, owned, self._held, os.getpid())

    def put(self, number: int, tensors: list[Tensor]) -> None:
        self._finish_puts(IN_FLIGHT - 1)
        insort(self._order, number)
        self._stored[number] = [(tensor.dtype, tensor.shape, tensor.device) for tensor in tensors]
        self.count += 1
        self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        copies, events = to_host(tensors)
        put = self._worker.submit(_put, self._store, self._key(number), copies, events, self._held)
        self._puts.append((number, put))

    def prefetch(self, below: int) -> None:
        """Begin to fetch the last stored state before a step, if there is one."""
        place = bisect_left(self._order, below)
        if place and self._order[place - 1] not in self._gets:
            number = self._order[place - 1]
            self._gets[number] = self._fetch(number)

    def get(self, number: int) -> list[Tensor]:
        """Return the state before a step; whatever else was prefetched is forgotten."""
        self._finish_puts(0)  # they are ahead of any get, as the thread does one thing after the other
        future = self._gets.pop(number, None) or self._fetch(number)
        self._gets.clear()
        tensors = self._result(future, number, "read")
        claim(tensors)
        self.reads += 1
        if [(tensor.dtype, tensor.shape, tensor.device) for tensor in tensors] != self._stored[number]:
            got = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
            raise StoreError(
                f"The state before step {number} must come back as it was stored, but store.get returned {got}. "
                "Let get return what put was given."
            )
        return tensors

    def drop_from(self, number: int) -> None:
        """Forget the states before a step and later ones; the thread removes them when it has time."""
        while self._order and self._order[-1] >= number:
            stored = self._order.pop()
            del self._stored[stored]
            self._worker.submit(_drop, self._store, self._key(stored), self._held)

    def seconds(self, tensors: list[Tensor]) -> float:
        """Measure the seconds that a state like this one takes to the store or back, whichever is longer."""
        key, devices = f"{self._run}-trial", [tensor.device for tensor in tensors]
        taken = []
        for _ in range(2):
            begin = time.perf_counter()
            copies, events = to_host(tensors)
            self._result(self._worker.submit(_put, self._store, key, copies, events, self._held), 0, "stored")
            middle = time.perf_counter()
            self._result(self._worker.submit(_get, self._store, key, devices), 0, "read")
            taken.append(max(middle - begin, time.perf_counter() - middle))
            self._result(self._worker.submit(_drop, self._store, key, self._held), 0, "dropped")
        self.waited = 0.0
        return min(taken)

    def close(self) -> None:
        """Stop the thread, and remove from the store what is left of this sweep."""
        self._puts.clear()
        self._gets.clear()
        self._finalizer()

    def _key(self, number: int) -> str:
        return f"{self._run}-{number:08d}"

    def _fetch(self, number: int) -> Future[Any]:
        devices = [device for _, _, device in self._stored[number]]
        return self._worker.submit(_get, self._store, self._key(number), devices)

    def _finish_puts(self, most: int) -> None:
        """Take the puts that are done, and wait until no more than ``most`` are left."""
        while self._puts and (len(self._puts) > most or self._puts[0][1].done()):
            number, future = self._puts.popleft()
            self._result(future, number, "stored")

    def _result(self, future: Future[Any], number: int, what: str) -> Any:
        begin = time.perf_counter()
        while not wait([future], timeout=_LOOK).done:
            if not self._worker.is_alive() and not future.done():
                raise StoreError(
                    f"The state before step {number} could not be {what}: the thread that stores states has ended. "
                    "Run the backward pass in the process that ran the forward pass, and run that again."
                )
        self.waited += time.perf_counter() - begin
        if (error := future.exception()) is not None:
            raise named(error, number, what, self._key(number)) from error
        return future.result()


class _Worker:
    """A thread that does one job after the other, begun with the first."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name="rmm_linear-store", daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._jobs.put((future, function, arguments))
        return future

    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self, last: Callable[[], None], left: Sized) -> None:
        """End the thread after what it has begun and a last job, which may begin twice if the thread is killed."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        if self._thread is None:
            last()
            return
        future = self.submit(last)
        self._jobs.put(None)
        if self._thread is threading.current_thread():  # garbage is collected in the middle of a job
            return
        before = len(left) + 1
        while self._thread.is_alive() and len(left) < before:
            before = len(left)
            self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            _logger.warning("A store has not answered for %g s; what is left in it is removed when it does.", _PATIENCE)
        elif not future.done() or future.exception() is not None:  # it was killed, so no other thread calls the store
            last()


def _work(jobs: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        future, function, arguments = job
        del job
        try:
            found = function(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            del arguments  # whoever waits for this may make another state at once
            future.set_result(found)
        # While it waits for the next job, it holds no tensor.
        future = function = arguments = found = None


def _put(store: Store, key: str, copies: list[Tensor], events: list[Any], held: dict[str, bool]) -> None:
    for event in events:
        event.synchronize()
    held[key] = False
    store.put(key, copies)
    held[key] = True


def _get(store: Store, key: str, devices: list[Any]) -> list[Tensor]:
    found = store.get(key)
    return to_device(found, devices) if len(found) == len(devices) else found  # the caller refuses another number


def _drop(store: Store, key: str, held: dict[str, bool]) -> None:
    store.drop(key)
    held.pop(key, None)


def _close(worker: _Worker, store: Any, owned: bool, held: dict[str, bool], process: int) -> None:
    if os.getpid() == process:  # a forked one has neither the thread nor a right to remove what is its parent's
        worker.stop(functools.partial(_leave_nothing, store, owned, held), held)


def _leave_nothing(store: Any, owned: bool, held: dict[str, bool]) -> None:
    """Remove what is left; an error is logged, since the gradients are right without this."""
    if owned:
        if hasattr(store, "close"):
            store.close()
        return
    failed = []
    for key, complete in list(held.items()):
        try:
            _drop(store, key, held)
        except Exception as error:
            failed += [(key, error)] if complete else []  # a store may not know what it could not put
    if failed:
        _logger.warning("A store did not drop %d states, the first %r: %r. Remove them there.", len(failed), *failed[0])


# Copies between an accelerator and the CPU, during the computation: on a stream of their own, by pinned memory.


def pinned_memory(size: int) -> Tensor | None:
    """Return pinned memory, uint8 of one dimension; None where the system refuses it, which a warning says once."""
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        _say_pageable((str(error).splitlines() or [""])[0].rstrip("."))
        return None


@functools.cache
def _say_pageable(reason: str) -> None:
    _logger.warning(
        "The system pins no more host memory (%s), so copies go to pageable memory, and the step waits for them. "
        "Raise the limit of the container or of WSL (ulimit -l, memory= in .wslconfig), or offload less.",
        reason,
    )


def host_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return pinned memory for a tensor, or pageable memory where the system refuses that."""
    found = pinned_memory(math.prod(shape) * dtype.itemsize)
    return torch.empty(shape, dtype=dtype, device="cpu") if found is None else found.view(dtype).view(shape)


def to_host(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """Begin to copy tensors to the CPU's memory; return them, and the events to wait for before they are read."""
    copies, events = [], []
    for tensor in (one.detach().resolve_conj().resolve_neg() for one in tensors):
        if tensor.device.type != "cuda":
            copies.append(tensor.cpu().contiguous())
            continue
        stream = side_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            copy = host_memory(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
            events.append(stream.record_event())
        copies.append(copy)
    return copies, events


def to_device(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """Copy tensors to devices, on a thread that may wait until they are there."""
    copies, streams = [], set()
    for tensor, device in zip(tensors, devices, strict=True):
        if device.type != "cuda":
            copies.append(tensor.to(device))
            continue
        stream = side_stream(device)
        with torch.cuda.stream(stream):
            pinned = tensor if tensor.is_pinned() else host_memory(tensor.shape, tensor.dtype).copy_(tensor)
            copies.append(pinned.to(device, non_blocking=True))
        streams.add(stream)
    for stream in streams:
        stream.synchronize()
    return copies


def claim(tensors: Sequence[Tensor]) -> None:
    """Tell the allocator that the streams which compute use tensors that :func:`to_device` made for another."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def wait_for_devices(devices: Sequence[torch.device]) -> None:
    """Wait until devices have done all that they were told, so that a clock says how long it took."""
    for device in devices:
        torch.get_device_module(device).synchronize(device)


@functools.cache
def side_stream(device: torch.device) -> Any:
    """Return the stream for copies; one for each device, since the allocator keeps memory for each stream."""
    return torch.cuda.Stream(device)
