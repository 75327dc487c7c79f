"""Threads and processes of sweeps: killed, forked, side by side, and a thread that lags."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from fault_helpers import kill
from planning_helpers import Recording, plain
from sweep_fault_helpers import INTERVAL, STEPS, Failing, alone, file_of, initial, is_tidy, run, step
from torch import Tensor

from rmm_linear.planning import StoreError
from rmm_linear.planning.stores import transfers as store_thread
from rmm_linear.planning.stores.transfers import IN_FLIGHT


def is_working(ident: int) -> bool:
    """Say whether a thread still does jobs; what Python does when it ends must not be disturbed."""
    frame = sys._current_frames().get(ident)
    while frame is not None and frame.f_code is not store_thread._work.__code__:
        frame = frame.f_back
    return frame is not None


def test_a_job_that_has_ended_holds_no_state() -> None:
    """Otherwise one more than ``IN_FLIGHT`` is there while the thread waits for the interpreter."""
    worker, begins = store_thread._Worker(), threading.Event()
    state = torch.ones(3)
    held, found = weakref.ref(state), list[object]()

    def put(_: Tensor) -> None:
        assert begins.wait(20)

    future = worker.submit(put, state)
    future.add_done_callback(lambda _: found.append(held()))
    del state
    assert held() is not None
    begins.set()
    worker.submit(lambda: None).result(20)
    worker.stop(lambda: None, [])
    assert found == [None]


def end_this_thread() -> None:
    """Let the interpreter end the thread, wherever it is, again and again until it has."""
    thread, ident = threading.current_thread(), threading.get_ident()

    def end() -> None:
        while thread.is_alive() and is_working(ident):  # a later thread, of another test, may get the same number
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))
            time.sleep(0.02)

    threading.Thread(target=end, daemon=True).start()
    time.sleep(0.05)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may be in a destructor
@pytest.mark.parametrize("what", ["put", "get"])
def test_a_thread_that_is_killed(what: str) -> None:
    store, u = Failing(what, 12, end_this_thread), initial()

    def slowly(number: int, u: Tensor) -> Tensor:
        time.sleep(0.01)
        return step(number, u)

    begin = time.monotonic()
    with pytest.raises(StoreError, match=r"The state before step \d+ could not be (stored|read)"):
        run(u, store, slowly).sum().backward()
    assert time.monotonic() - begin < 20
    assert u.grad is None
    assert store.kept == {}


def test_a_backward_pass_in_a_forked_process(tmp_path: Path) -> None:
    """The thread is its parent's."""
    final = run(initial(), tmp_path)

    def backward() -> int:
        try:
            final.sum().backward()
        except StoreError as error:
            return 0 if "thread that stores states has ended" in str(error) else 1
        return 2

    assert alone(backward) == 0
    final.sum().backward()
    assert is_tidy(tmp_path)


def test_a_killed_process_leaves_files_that_the_next_run_removes(tmp_path: Path) -> None:
    def die() -> int:
        def advance(number: int, u: Tensor) -> Tensor:
            if number == 27:
                file_of(tmp_path, 20)
                kill()
            return step(number, u)

        run(initial(), tmp_path, advance)
        return 0

    assert alone(die) == -9
    left = [*tmp_path.glob("rmm-*/*.safetensors")]
    assert len(left) > 3
    u, expected = initial(), initial()
    run(u, tmp_path).sum().backward()
    plain(step, expected, STEPS).sum().backward()
    assert torch.equal(u.grad, expected.grad)
    assert is_tidy(tmp_path)


def test_two_runs_at_once_in_one_folder(tmp_path: Path) -> None:
    """Another process runs from beginning to end between this one's passes, and a third is killed."""
    u, expected = initial(), initial()
    plain(step, expected, STEPS).sum().backward()

    def other() -> int:
        v = initial()
        run(v, tmp_path).sum().backward()
        return 0 if torch.equal(v.grad, expected.grad) else 1

    def killed() -> int:
        final = run(initial(), tmp_path)
        kill()
        return int(final.sum())

    final = run(u, tmp_path)
    assert alone(killed) == -9
    assert alone(other) == 0
    final.sum().backward()
    assert torch.equal(u.grad, expected.grad)
    assert is_tidy(tmp_path)


def test_no_more_states_are_on_their_way_than_two() -> None:
    gate = threading.Event()

    class Stuck(Recording):
        def put(self, key: str, tensors: list[Tensor]) -> None:
            gate.wait(20)
            super().put(key, tensors)

    reached: list[int] = []

    def advance(number: int, u: Tensor) -> Tensor:
        reached.append(number)
        return step(number, u)

    runner = threading.Thread(target=lambda: run(initial(), Stuck(), advance))
    runner.start()
    for _ in range(1000):
        if len(reached) >= (IN_FLIGHT + 1) * INTERVAL:
            break
        time.sleep(0.01)
    time.sleep(0.2)
    assert max(reached) == (IN_FLIGHT + 1) * INTERVAL - 1  # the next state has to wait
    gate.set()
    runner.join(20)
    assert max(reached) == STEPS - 1
