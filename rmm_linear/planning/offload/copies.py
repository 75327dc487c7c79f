"""Copy bytes out of the memory that a step computes in, and back again, begun early.

A CPU's go to files, an accelerator's to pinned memory, fake ones nowhere: only their size is noted. Each copy has
``begin()``, which allocates on the calling thread and begins to copy back, and ``let_go()``, which frees what a copy
still reads; what ``begin()`` returns has ``wait()``, which returns the bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rmm_linear.planning.stores.base import StoreError
from rmm_linear.planning.stores.files import FileStore
from rmm_linear.planning.stores.transfers import pinned_memory, side_stream

_READER = "rmm_linear-offload"  # a thread's name begins so


class Returning(Protocol):
    """Bytes on their way back."""

    def wait(self) -> Tensor:
        """Return them, shape (N,), uint8, fit for the stream that computes now."""
        ...


class Copy(Protocol):
    """Bytes that are elsewhere."""

    def begin(self) -> Returning:
        """Begin to bring them back; as often as is asked for."""
        ...

    def let_go(self) -> None:
        """Free the memory that they came from, once it is copied."""
        ...


class Files:
    """A folder of this process for copies, and the thread that reads them back."""

    def __init__(self, folder: Path) -> None:
        """Make a folder in the user's; it is removed with this object, at the latest when the process ends."""
        self.owner = os.getpid()  # a forked process has neither the thread nor a right to the files
        self.store = FileStore(folder)
        self.reader = ThreadPoolExecutor(1, _READER)
        self.numbers = itertools.count()

    @property
    def is_usable(self) -> bool:
        """Whether this process can write there: it made the folder, and nobody has removed it since."""
        return self.owner == os.getpid() and self.store.path("").parent.is_dir()


class FileCopy:
    """A file, written when it is made and removed when it is forgotten."""

    def __init__(self, content: Tensor, files: Files) -> None:
        """Write bytes of the CPU, uint8 of one dimension, to the file."""
        self._files, self._key, self._size = files, f"offload-{next(files.numbers):08d}", content.numel()
        files.store.put(self._key, [content])
        weakref.finalize(self, _drop, files.store, self._key, files.owner)

    def begin(self) -> _FromFile:
        """Allocate, and let the thread read; an error comes when the bytes are asked for, which may never happen."""
        return _FromFile(self._size, self._files, self._key)

    def let_go(self) -> None:
        """Do nothing: the file is complete."""


class _FromFile:
    def __init__(self, size: int, files: Files, key: str) -> None:
        self._content = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._box, self._owner = [self._content], files.owner
        self._future: Future[None] | None = Future()
        if os.getpid() == files.owner:
            self._future = files.reader.submit(_read, files.store, key, self._box)
        else:
            self._future.set_exception(
                StoreError(
                    f"{files.store.path(key)} is of another process. Run the backward pass in the process that ran "
                    "the forward pass."
                )
            )

    def wait(self) -> Tensor:
        future = self._future
        try:
            if future is not None:
                future.result()
        finally:  # an error has this frame, which must not have the future that has the error
            self._future = None
            del future
        return self._content

    def __del__(self) -> None:
        """Wait until the thread has not the tensor any more, so that memory does not depend on its speed."""
        # The thread itself may collect garbage, and a forked process has no such thread.
        waits = os.getpid() == self._owner and not threading.current_thread().name.startswith(_READER)
        if self._future is not None and not self._future.cancel() and waits:
            wait([self._future])
        self._box.clear()


def _read(store: FileStore, key: str, box: list[Tensor]) -> None:
    """Read a file into the tensor in a box, which nothing on this thread has once this returns."""
    store.read(key, [box.pop()])


def _drop(store: FileStore, key: str, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError):  # the folder is emptied at the end
            store.drop(key)


_LEAST, _MOST = 64 << 20, 1 << 30  # bytes of a segment, but for blocks that are larger
_ALIGNED = 512
_PART = _LEAST  # of a copy, so that what is larger than a segment fills several and leaves no power of two empty


class PinnedArena:
    """Pinned memory for the copies of one device: blocks of a few segments, which later steps take again.

    PyTorch pins every block by itself, in a call that stalls the step, and rounds its bytes up to a power of two.
    Segments are powers of two, so nothing is rounded; each is as large as all before it, between 64 MiB and 1 GiB. The
    first step pins them, and later ones what they need in addition. Blocks that the system pins no memory for are
    pageable.

    A block that was given back can be taken at once, although a copy may still read it: all copies of a device run one
    after the other on one stream. So a device has an arena of its own, and nothing but copies uses its blocks.
    """

    def __init__(self, pin: Callable[[int], Tensor | None] = pinned_memory) -> None:
        """Begin without a segment; ``pin`` makes one, or returns None where the system refuses it."""
        self._pin, self._is_refused = pin, False
        self._segments: list[Tensor] = []
        self._holes: list[tuple[int, int, int]] = []  # segment, begin and end, in order
        self._returned: deque[tuple[int, int, int]] = deque()  # by finalizers, which run at any time on any thread
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        return sum(map(len, self._segments))

    def take(self, size: int) -> tuple[Tensor, Callable[[], None]]:
        """Return a block, uint8, shape (size,), and what gives it back."""
        room = max(1, -(-size // _ALIGNED)) * _ALIGNED
        with self._lock:
            self._join_holes()
            place = next((place for place, (_, begin, end) in enumerate(self._holes) if end - begin >= room), None)
            if place is None:
                place = self._grow(room)
            if place is None:
                return torch.empty(size, dtype=torch.uint8, device="cpu"), lambda: None
            segment, begin, end = self._holes[place]
            self._holes[place : place + 1] = [(segment, begin + room, end)] if begin + room < end else []
        block = segment, begin, begin + room
        return self._segments[segment][begin : begin + size], lambda: self._returned.append(block)

    def _grow(self, room: int) -> int | None:
        """Pin another segment, and return the place of its hole; None if the system refused one."""
        grown = 1 << max(self.bytes, 1).bit_length() - 1
        size = max(1 << (room - 1).bit_length(), min(max(grown, _LEAST), _MOST))
        found = None if self._is_refused else self._pin(size)
        if found is None:
            self._is_refused = True
            return None
        self._holes.append((len(self._segments), 0, size))
        self._segments.append(found)
        return len(self._holes) - 1

    def _join_holes(self) -> None:
        if not self._returned:
            return
        while self._returned:
            self._holes.append(self._returned.popleft())
        joined: list[tuple[int, int, int]] = []
        for segment, begin, end in sorted(self._holes):
            if joined and joined[-1][0] == segment and joined[-1][2] == begin:
                begin = joined.pop()[1]
            joined.append((segment, begin, end))
        self._holes = joined


class PinnedCopy:
    """Pinned memory, filled on a stream of its own. Neither the host nor the stream that computes waits for that."""

    def __init__(self, content: Tensor, arena: PinnedArena) -> None:
        """Begin to copy bytes of an accelerator, uint8 of one dimension. They live until :meth:`let_go`."""
        self._parts = list[Tensor]()
        for part in content.split(_PART):
            pinned, give_back = arena.take(part.numel())
            self._parts.append(pinned)
            weakref.finalize(self, give_back).atexit = False
        self._size, self._device = content.numel(), content.device
        self._held: _OnDevice | None = _OnDevice.copied(self._parts, content.split(_PART), content)

    def begin(self) -> _OnDevice:
        """Allocate and begin to copy back; bytes that are still there are returned as they are."""
        held, self._held = self._held, None
        if held is not None:
            return held
        content = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        return _OnDevice.copied(content.split(_PART), self._parts, content)

    def let_go(self) -> None:
        """Let the stream that computes wait for the copy, and free the memory on the device."""
        self._held = None


class _OnDevice:
    """Memory of a device that a stream of copies uses until an event.

    The allocator's ``record_stream`` would free it when the host finds the event done, so the peak would depend on how
    far the host is ahead of the device. Here the stream that it was allocated on waits for the event before it is
    freed, however that comes about, so it can be given away at once.
    """

    def __init__(self, content: Tensor, event: Any, stream: Any) -> None:
        self._content, self._event, self._stream = content, event, stream

    @classmethod
    def copied(cls, targets: Sequence[Tensor], sources: Sequence[Tensor], content: Tensor) -> _OnDevice:
        """Begin to copy between pinned memory and a device, whose tensor is the content."""
        compute, side = torch.cuda.current_stream(content.device), side_stream(content.device)
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            event = side.record_event()
        return cls(content, event, compute)

    def wait(self) -> Tensor:
        stream = torch.cuda.current_stream(self._content.device)
        stream.wait_event(self._event)
        if stream != self._stream:
            self._content.record_stream(stream)
        return self._content

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then the device may be gone
            self._stream.wait_event(self._event)


class SizeCopy:
    """Of fake bytes, only how many they are; they live as long as the others would."""

    def __init__(self, content: Tensor, *, is_held: bool) -> None:
        """Note the size of fake bytes, which stay for a while, as an accelerator's do, or are written at once."""
        self._size, self._device = content.numel(), content.device
        self._held = _Here(content) if is_held else None

    def begin(self) -> _Here:
        held, self._held = self._held, None
        return held or _Here(torch.empty(self._size, dtype=torch.uint8, device=self._device))

    def let_go(self) -> None:
        """Free the memory as :class:`PinnedCopy` does."""
        self._held = None


class _Here:
    def __init__(self, content: Tensor) -> None:
        self._content = content

    def wait(self) -> Tensor:
        return self._content
