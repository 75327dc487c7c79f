"""Give every run a folder of its own inside of the user's, and remove folders that killed runs left behind.

Next to a folder ``rmm-<12 hexadecimal digits>/`` lies ``rmm-<the same>.lock``, which names the host, and which its
process keeps locked. The system releases the lock when the process ends, however it ends; so a lock of this host that
can be had has no owner, and its folder is removed. Locks of other hosts are left alone, since some network
filesystems lock for one host only. Of a folder, nothing is removed but what a store writes.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import uuid
import weakref
from pathlib import Path
from typing import Any

from rmm_linear.planning.stores.base import StoreError

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed: that is lock enough
    fcntl = None

_LOCK = re.compile(r"rmm-[0-9a-f]{12}\.lock")
WRITTEN = (".safetensors", ".part")  # suffixes of all files that a store writes into its folder


class RunFolder:
    """A folder with a name of its own, removed at the latest when the process ends."""

    def __init__(self, parent: Path) -> None:
        """Make the folder, and remove what killed runs left next to it."""
        refuse_file(parent)
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _no_folder(parent, f"which cannot be made: {error.strerror or error}") from error
        remove_abandoned(parent)
        lock = None
        while lock is None:  # another process that tidies up may take a lock that is not locked yet
            self.path = parent / f"rmm-{uuid.uuid4().hex[:12]}"
            try:
                lock = _locked(_lock_of(self.path))
                if lock is not None:
                    self.path.mkdir()
            except OSError as error:
                if lock is not None:
                    os.close(lock)
                with contextlib.suppress(OSError):
                    _lock_of(self.path).unlink()
                raise StoreError(
                    f"{_lock_of(self.path)} must be made and locked, got: {error.strerror or error}. Give a folder "
                    "where files can be written and locked (flock), on a local disk for example."
                ) from error
        # A forked process has this object too, and must not remove its parent's files.
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def remove(self) -> None:
        """Remove the folder, now."""
        self._finalizer()


def refuse_file(store: Any) -> None:
    """Raise if a store is a path that is no folder, and cannot become one because it or a part of it is a file."""
    path = Path(store) if isinstance(store, str | os.PathLike) and store != "cpu" else None
    there = next((each for each in (path, *path.parents) if each.exists()), None) if path else None
    if there is not None and not there.is_dir():
        raise _no_folder(path, "which is a file" if there == path else f"but {str(there)!r} is a file")


def _no_folder(path: Path | None, why: str) -> StoreError:
    return StoreError(
        f"store must be a folder, or where one can be made, got {str(path)!r}, {why}. Give another folder, "
        '"cpu", or an object with put, get and drop.'
    )


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of this host's runs whose process has ended without doing so."""
    for path in parent.glob("rmm-*.lock"):
        with contextlib.suppress(OSError):  # another process is faster, or the file is another user's
            is_lock = _LOCK.fullmatch(path.name) and path.is_file() and path.stat().st_size == len(_mark())
            if is_lock and path.read_bytes() == _mark():
                lock = _locked(path)
                if lock is not None:
                    _remove(path.with_suffix(""), lock, os.getpid())


def _mark() -> bytes:
    return f"rmm_linear on {socket.gethostname()}\n".encode()


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")


def _locked(path: Path) -> int | None:
    """Return the descriptor of a lock file that is now this process's, or None if another process has it."""
    if fcntl is None:
        with contextlib.suppress(FileNotFoundError):
            try:
                path.unlink()
            except PermissionError:
                return None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if fcntl is None or os.fstat(descriptor).st_ino == path.stat().st_ino:
            os.write(descriptor, _mark())
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
    with contextlib.suppress(OSError):
        _empty(path)
        path.rmdir()
    if fcntl is None:
        os.close(lock)
    if not os.path.lexists(path):  # else the next run has to know the folder
        with contextlib.suppress(OSError):
            _lock_of(path).unlink()
    if fcntl is not None:  # removed while it is still locked, so that no other process takes it for an abandoned one
        os.close(lock)


def _empty(path: Path) -> None:
    if path.is_symlink():
        return
    for file in path.iterdir():
        if file.suffix in WRITTEN:
            with contextlib.suppress(OSError):
                file.unlink()
