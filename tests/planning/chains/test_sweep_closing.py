"""What closes a sweep leaves nothing in a store of the user's own: on the store's thread, and errors are said."""

from __future__ import annotations

import gc
import logging
import threading
import time
from pathlib import Path

import pytest
from planning_helpers import Recording
from sweep_fault_helpers import alone, initial, run
from torch import Tensor

from rmm_linear.planning.stores import transfers as store_thread


class Watched(Recording):
    """A store that knows which threads call it, and whether two do at once."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.overlapped, self._lock = False, threading.Lock()

    def put(self, key: str, tensors: list[Tensor]) -> None:
        self.called()
        with self._lock:
            self.wait()
            super().put(key, tensors)

    def drop(self, key: str) -> None:
        self.called()
        with self._lock:
            super().drop(key)

    def called(self) -> None:
        self.threads.add(threading.get_ident())
        self.overlapped |= self._lock.locked()

    def wait(self) -> None:
        """Nothing to wait for."""


def test_the_thread_that_puts_also_drops_what_is_left() -> None:
    store = Watched()
    final = run(initial(), store)
    del final
    gc.collect()
    assert store.kept == {}
    assert len(store.threads) == 1


def test_a_store_that_does_not_answer_is_not_called_by_a_second_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_thread, "_PATIENCE", 0.05)
    gate, stuck = threading.Event(), threading.Event()

    class Stuck(Watched):
        def wait(self) -> None:
            if len(self.kept) == 6:
                stuck.set()
                gate.wait(20)

    store = Stuck()
    with caplog.at_level(logging.WARNING, logger="rmm_linear"):
        final = run(initial(), store)
        assert stuck.wait(20)  # what has not begun to be stored when a sweep is closed never is
        del final
        gc.collect()
    assert "has not answered for 0.05 s" in caplog.text
    gate.set()
    for thread in [thread for thread in threading.enumerate() if thread.name == "rmm_linear-store"]:
        thread.join(20)
    assert store.kept == {}
    assert not store.overlapped
    assert len(store.threads) == 1


def test_a_slow_store_is_waited_for_as_long_as_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all, its drops last longer than the patience for each."""
    monkeypatch.setattr(store_thread, "_PATIENCE", 3.0)  # seconds in which a busy machine comes back to one drop

    class Slow(Recording):
        def drop(self, key: str) -> None:
            time.sleep(0.5)
            super().drop(key)

    store = Slow()
    final = run(initial(), store)
    for _ in range(2000):  # what has not begun to be stored when a sweep is closed never is
        if len(store.done) == 7:
            break
        time.sleep(0.01)
    del final
    gc.collect()
    assert store.kept == {}
    assert len(store.done) == 14


def test_what_a_store_does_not_drop_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Keeping(Recording):
        def drop(self, key: str) -> None:
            raise OSError("read-only")

    with caplog.at_level(logging.WARNING, logger="rmm_linear"):
        run(initial(), Keeping()).sum().backward()
    assert "did not drop 7 states, the first 'sweep-" in caplog.text
    assert "OSError('read-only')" in caplog.text


def test_a_forked_process_drops_nothing_of_its_parent(tmp_path: Path) -> None:
    class Files(Recording):
        def drop(self, key: str) -> None:
            (tmp_path / key).touch()
            super().drop(key)

    finals = [run(initial(), Files())]

    def forget() -> int:
        finals.clear()
        gc.collect()
        return 0

    assert alone(forget) == 0
    assert list(tmp_path.iterdir()) == []
    finals.clear()
    gc.collect()
    assert len(list(tmp_path.iterdir())) == 7
