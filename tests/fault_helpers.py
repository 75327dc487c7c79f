"""What the tests of faults share: processes that are killed, disks that are full."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


def in_a_child(run: Callable[[], int]) -> int:
    """Run in a forked process, which may be killed, and return how it ended: its status, or minus the signal."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            with (
                open(os.devnull, "w") as nothing,
                contextlib.redirect_stdout(nothing),
                contextlib.redirect_stderr(nothing),
            ):
                status = run()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file may grow beyond `room` bytes: the kernel itself refuses, as on a full disk."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def at_write(patch: pytest.MonkeyPatch, number: int, fault: Callable[[], Any]) -> None:
    """Let a fault come instead of what is done `number`-th to a file: flushed, given its name, or removed."""
    done = [0]

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            done[0] += 1
            if done[0] == number + 1:
                fault()
            return original(*args, **kwargs)

        return call

    patch.setattr(os, "fsync", counted(os.fsync))
    patch.setattr(Path, "replace", counted(Path.replace))
    patch.setattr(Path, "unlink", counted(Path.unlink))
    patch.setattr(os, "unlink", counted(os.unlink))


def no_room() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
