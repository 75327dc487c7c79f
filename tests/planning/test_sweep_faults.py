"""Faults while a sweep runs: one error that names step and file, no hang, no gradient, nothing left in the folder."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_helpers import full_disk, in_a_child, kill
from planning_helpers import Recording, plain
from torch import Tensor

from rmm_linear.planning import StoreError, sweep
from rmm_linear.planning.store_thread import IN_FLIGHT

STEPS, INTERVAL = 30, 4
SIZE = 1 << 12


def step(number: int, u: Tensor) -> Tensor:
    return torch.sin(u) + 0.01 * number


def initial() -> Tensor:
    return torch.linspace(0, 1, SIZE).requires_grad_()


def run(u: Tensor, store: Any, advance: Callable[[int, Tensor], Tensor] = step) -> Tensor:
    return sweep(advance, u, STEPS, slots=2, store=store, interval=INTERVAL)


def alone(job: Callable[[], int]) -> int:
    """Run in a forked process, on one thread: those that its parent computes with are not in it."""

    def child() -> int:
        torch.set_num_threads(1)
        return job()

    return in_a_child(child)


def file_of(folder: Path, number: int) -> Path:
    for _ in range(500):  # the thread may not be there yet
        found = list(folder.glob(f"rmm-*/*-{number:08d}.safetensors"))
        if found:
            return found[0]
        time.sleep(0.01)
    raise AssertionError(f"no file of step {number}")


def is_tidy(folder: Path) -> bool:
    gc.collect()
    return list(folder.iterdir()) == []


def test_a_full_disk(tmp_path: Path) -> None:
    """The kernel refuses a state of 16 KB: here by a limit of files' sizes, as on a disk that is full."""
    u = initial()
    message = r"The state before step 4 could not be stored: .*-00000004\.safetensors cannot be written: .*Make room"
    with full_disk(1 << 13), pytest.raises(StoreError, match=message):
        run(u, tmp_path).sum().backward()
    assert u.grad is None
    assert is_tidy(tmp_path)


def test_a_disk_that_becomes_full_at_the_last_state(tmp_path: Path) -> None:
    """The forward pass has ended before anybody knows; the backward pass says so."""
    u, gone = initial(), tmp_path / "gone"

    def advance(number: int, u: Tensor) -> Tensor:
        if number == 27 and not gone.exists():
            file_of(tmp_path, 24).parent.rename(gone)
        return step(number, u)

    final = run(u, tmp_path, advance)
    with pytest.raises(
        StoreError, match=r"state before step 28 could not be stored: .* cannot be written: No such file"
    ):
        final.sum().backward()
    assert u.grad is None


def test_a_full_device(tmp_path: Path) -> None:
    """ENOSPC itself, from a filesystem of 1 MB, where this user may mount one; else from /dev/full."""
    code = textwrap.dedent(
        """
        import os, pathlib, sys, torch
        from rmm_linear.planning import StoreError, store_files, sweep
        folder = pathlib.Path(sys.argv[1])
        if sys.argv[2] == "full":
            real = open
            store_files.open = lambda path, mode, **options: real("/dev/full" if "w" in mode else path, mode, **options)
        u = torch.ones(1 << 16, requires_grad=True)
        try:
            sweep(lambda i, u: torch.sin(u), u, 100, slots=2, store=folder, interval=2).sum().backward()
        except StoreError as error:
            print(error, list(folder.iterdir()), u.grad)
        """
    )
    mounted = f'mount -t tmpfs -o size=1m none {tmp_path} && {sys.executable} -c "$CODE" {tmp_path} mounted'
    environment = os.environ | {"CODE": code}
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mounted], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        command = [sys.executable, "-c", code, str(tmp_path), "full"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "cannot be written: No space left on device. Make room" in done.stdout, done.stderr
    assert "The state before step " in done.stdout
    assert done.stdout.endswith(" [] None\n")


def test_a_deleted_file(tmp_path: Path) -> None:
    u = initial()
    final = run(u, tmp_path)
    file_of(tmp_path, 28)  # the last is written, so all are
    file_of(tmp_path, 16).unlink()
    with pytest.raises(StoreError, match=r"before step 16 could not be read: .*-00000016\.safetensors cannot be read"):
        final.sum().backward()
    assert u.grad is None
    assert is_tidy(tmp_path)


@pytest.mark.parametrize("fault", ["changed", "shortened"])
def test_a_damaged_file(fault: str, tmp_path: Path) -> None:
    u = initial()
    final = run(u, tmp_path)
    file_of(tmp_path, 28)
    path = file_of(tmp_path, 12)
    content = bytearray(path.read_bytes())
    content[-20] ^= 4
    path.write_bytes(content if fault == "changed" else content[:-100])
    with pytest.raises(StoreError, match=r"before step 12 could not be read: .*-00000012\.safetensors is damaged"):
        final.sum().backward()
    assert u.grad is None
    assert is_tidy(tmp_path)


class Failing(Recording):
    """A store of the user's own that fails at one state."""

    def __init__(self, what: str, number: int, fault: Callable[[], Any]) -> None:
        super().__init__()
        self.fail_at, self.fault = (what, number), fault

    def put(self, key: str, tensors: list[Tensor]) -> None:
        super().put(key, tensors)
        if self.done[-1] == self.fail_at:
            self.fault()

    def get(self, key: str) -> list[Tensor]:
        found = super().get(key)
        return self.fault() if self.done[-1] == self.fail_at else found


def raising(error: BaseException) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


@pytest.mark.parametrize("error", [RuntimeError("out of order"), SystemExit(1), KeyboardInterrupt(), TimeoutError()])
@pytest.mark.parametrize("what", ["put", "get"])
def test_a_store_that_fails(what: str, error: BaseException) -> None:
    store, u = Failing(what, 16, raising(error)), initial()
    with pytest.raises(
        StoreError, match=rf"state before step 16 could not be \w+ under the key '.*-00000016': {type(error).__name__}"
    ):
        run(u, store).sum().backward()
    assert u.grad is None
    assert store.kept == {}


def test_a_store_that_returns_something_else() -> None:
    store = Failing("get", 16, lambda: [torch.zeros(SIZE), torch.get_rng_state()[:-1]])
    with pytest.raises(StoreError, match="before step 16 must come back as it was stored"):
        run(initial(), store).sum().backward()
    assert store.kept == {}


def end_this_thread() -> None:
    """Let the interpreter end the thread, wherever it is, again and again until it has."""
    ident = threading.get_ident()

    def end() -> None:
        while any(thread.ident == ident for thread in threading.enumerate()):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))
            time.sleep(0.005)

    threading.Thread(target=end, daemon=True).start()
    time.sleep(0.05)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
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


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_a_step_that_fails(at: str, tmp_path: Path) -> None:
    u, passes = initial(), []

    def advance(number: int, u: Tensor) -> Tensor:
        passes.append(number)
        if number == 20 and (at == "forward" or passes.count(20) > 1):
            raise ZeroDivisionError
        return step(number, u)

    with pytest.raises(ZeroDivisionError):
        run(u, tmp_path, advance).sum().backward()
    assert u.grad is None
    assert is_tidy(tmp_path)


def test_a_forward_pass_without_a_backward_pass(tmp_path: Path) -> None:
    store = Recording()
    for one in (tmp_path, store):
        final = run(initial(), one)
        del final
    assert is_tidy(tmp_path)
    assert store.kept == {}
    assert not [thread for thread in threading.enumerate() if thread.name == "rmm_linear-store"]


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
    time.sleep(0.5)
    assert max(reached) == (IN_FLIGHT + 1) * INTERVAL - 1  # the next state has to wait
    gate.set()
    runner.join(20)
    assert max(reached) == STEPS - 1
