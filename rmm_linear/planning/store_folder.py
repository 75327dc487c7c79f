"""One run's folder inside of the user's: nobody else's while the run lives, and known as left behind when it does not.

Beside a folder ``rmm-<id>/`` lies ``rmm-<id>.lock``, which its process keeps locked. The system releases the lock
when the process ends, however it ends; so a lock that can be had belongs to nobody, and its folder is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
import weakref
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed: that is lock enough
    fcntl = None


class RunFolder:
    """A folder with a name of its own, removed at the latest when the process ends."""

    def __init__(self, parent: Path) -> None:
        """Make the folder, and remove what killed runs left beside it.

        Args:
            parent: The user's folder; made if it is not there.
        """
        parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(parent)
        lock = None
        while lock is None:  # somebody who tidies up may take a lock that is not locked yet
            self.path = parent / f"rmm-{uuid.uuid4().hex[:12]}"
            lock = _locked(_lock_of(self.path))
        self.path.mkdir()
        # A forked process has this object too, and must not remove its parent's files.
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def remove(self) -> None:
        """Remove the folder, now."""
        self._finalizer()


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of runs whose process has ended without doing so.

    Args:
        parent: The user's folder.
    """
    for path in parent.glob("rmm-*.lock"):
        with contextlib.suppress(OSError):  # another process is faster, or the file is another user's
            lock = _locked(path)
            if lock is not None:
                _remove(path.with_suffix(""), lock, os.getpid())


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")


def _locked(path: Path) -> int | None:
    """Return the descriptor of a lock file that is now this process's, or None if it is somebody else's."""
    if fcntl is None:
        with contextlib.suppress(FileNotFoundError):
            try:
                path.unlink()
            except PermissionError:
                return None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if fcntl is None:
        return descriptor
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return
    shutil.rmtree(path, ignore_errors=True)
    if fcntl is None:
        os.close(lock)
    with contextlib.suppress(OSError):
        _lock_of(path).unlink()
    if fcntl is not None:  # removed while it is still locked, so that nobody else takes it for an abandoned one
        os.close(lock)
