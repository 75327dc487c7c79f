"""What the tests of faults share: processes that are killed, disks that are full."""

import contextlib
import errno
import os
import resource
import signal
from pathlib import Path


def in_a_child(run):
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


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def full_disk(room):
    """No file may grow beyond `room` bytes: the kernel itself refuses, as on a full disk."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def at_write(patch, number, fault):
    """Let a fault come instead of what is done `number`-th to a file: flushed, given its name, or removed."""
    done = [0]

    def counted(original):
        def call(*args, **kwargs):
            done[0] += 1
            if done[0] == number + 1:
                fault()
            return original(*args, **kwargs)

        return call

    patch.setattr(os, "fsync", counted(os.fsync))
    patch.setattr(Path, "replace", counted(Path.replace))
    patch.setattr(Path, "unlink", counted(Path.unlink))
    patch.setattr(os, "unlink", counted(os.unlink))


def no_room():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
