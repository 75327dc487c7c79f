"""States of bptt and sweep in stores: what goes there, when it leaves, and one error that names the step and the key.

Whatever fails, there is no hang, no gradient, and nothing is left in the store.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bptt_helpers import B, Dropping, H, T, inputs, loop, outcome, planned, same
from fault_helpers import full_disk, in_a_child
from planning_helpers import Recording, plain
from torch import Tensor

from rmm_linear.planning import StoreError, bptt, sweep
from rmm_linear.planning.stores import transfers
from rmm_linear.planning.stores.transfers import IN_FLIGHT

STEPS, INTERVAL = 30, 4
SIZE = 1 << 12


def step(number: int, u: Tensor) -> Tensor:
    return torch.sin(u) + 0.01 * number


def initial() -> Tensor:
    return torch.linspace(0, 1, SIZE).requires_grad_()


def rolled(u: Tensor, store: Any, advance: Callable[[int, Tensor], Tensor] = step) -> Tensor:
    numbers = torch.arange(STEPS)
    return bptt(lambda n, u: (None, advance(int(n), u)), numbers, u, slots=5, internal=False, store=store)[1]


def swept(u: Tensor, store: Any, advance: Callable[[int, Tensor], Tensor] = step) -> Tensor:
    return sweep(advance, u, STEPS, slots=2, store=store, interval=INTERVAL)


both = pytest.mark.parametrize("run", [rolled, swept])


def assert_fails(run: Any, store: Any, message: str | None, error: Any = StoreError) -> None:
    """Fail with one error, without a gradient, and leave nothing; no state though the traceback is held."""
    u = initial()
    with pytest.raises(error, match=message) as caught:
        run(u, store).sum().backward()
    assert u.grad is None
    if not isinstance(store, Path):
        assert store.what == "drop" or store.held == {}
        return
    assert not list(store.glob("*/*"))
    del caught
    assert is_tidy(store)


def files(folder: Path) -> list[Path]:
    """Wait until all states of a run are written, and return their files."""
    for _ in range(500):
        found = sorted(folder.glob("rmm-*/*.safetensors"))
        if len(found) >= 5 and (not found[0].name.startswith("sweep") or found[-1].stem.endswith("28")):
            return found
        time.sleep(0.01)
    raise AssertionError(found)


def is_tidy(folder: Path) -> bool:
    gc.collect()
    return not list(folder.iterdir())


def alone(job: Callable[[], int]) -> int:
    """Run in a forked process, on one thread: those that its parent computes with are not in it."""

    def child() -> int:
        torch.set_num_threads(1)
        return job()

    return in_a_child(child)


# What goes there, and when it leaves


@both
@pytest.mark.parametrize("kind", ["own", "cpu", "folder"])
def test_states_go_to_a_store_and_leave_it(run: Any, kind: str, tmp_path: Path) -> None:
    u, expected = initial(), initial()
    plain(step, expected, STEPS).sum().backward()
    store = Recording()
    place: Any = {"own": store, "cpu": "cpu", "folder": tmp_path}[kind]
    run(u, place).sum().backward()
    assert torch.equal(u.grad, expected.grad)
    assert is_tidy(tmp_path)
    if kind == "own":
        assert store.held == {}
        assert store.most == (5 if run is rolled else 7)
        finals = [run(initial(), store) for _ in range(2)]  # under keys of their own
        del finals[0]  # no backward pass: they go with the graph
        gc.collect()
        assert len({key.rpartition("-")[0] for key in store.held}) == 1
        del finals
        gc.collect()
        assert store.held == {}
    if kind == "folder":
        final = run(initial(), place)
        assert len(files(tmp_path)) == (5 if run is rolled else 7)
        del final
        assert is_tidy(tmp_path)
        with torch.no_grad():
            run(initial(), place)
        assert is_tidy(tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name == "rmm_linear-store"]


@pytest.mark.parametrize("kind", ["cpu", "folder"])
def test_random_numbers_and_trees_of_bptt_are_stored_too(kind: str, tmp_path: Path) -> None:
    cell, store = Dropping(), "cpu" if kind == "cpu" else tmp_path
    given = cell, inputs(), cell.start()
    assert same(outcome(loop, *given), outcome(planned(slots=5, internal=False, store=store), *given))


def test_a_state_that_was_just_stored_is_not_read_back() -> None:
    store = Recording()
    outputs, _ = bptt(torch.nn.LSTMCell(H, H), inputs(), None, slots=T, internal=False, store=store)
    assert (store.count("put"), store.count("get")) == (T - 2, 0)
    outputs.sum().backward()
    assert store.count("get") <= store.count("put") == T - 2


@pytest.mark.parametrize("kind", ["cpu", "folder"])
def test_strides_and_lazy_conjugates_come_back(kind: str, tmp_path: Path) -> None:
    seen = []

    def run(x: Tensor, state: Any) -> Any:
        turned, lazy = state
        seen.append((turned.stride(), turned.sum().item(), lazy.resolve_conj().sum().item()))
        return None, ((turned.mT + x.mean()).contiguous().mT, (lazy * (1 + 1j)).conj())

    start = torch.ones(H, B).T, torch.full((B, H), 1 - 2j).conj()
    store = "cpu" if kind == "cpu" else tmp_path
    _, (last, lazy) = bptt(run, inputs(), start, slots=5, internal=False, store=store)
    first = set(seen)
    (last.sum() + lazy.real.sum()).backward()
    assert set(seen) == first
    assert {stride for stride, *_ in seen} == {(1, B)}


# Stores that fail


def raising(error: BaseException) -> Callable[[Any], Any]:
    def fail(_: Any) -> Any:
        raise error

    return fail


@both
@pytest.mark.parametrize(
    ("what", "fault", "message"),
    [
        ("put", raising(OSError("disk full")), r"stored under the key '.*-0*\1': OSError\('disk full'\)"),
        ("get", raising(KeyError("gone")), r"read under the key '.*-0*\1': KeyError"),
        ("get", raising(StoreError("/there/a.safetensors is damaged")), "read: /there/a.safetensors is damaged"),
        ("get", lambda found: None, "read under the key .*NoneType"),
        ("get", lambda found: found[:-1], r"store\.get returned \["),
        ("get", lambda found: [one.double() for one in found], r"store\.get returned \[\(torch.float64, \(4096,\)\)"),
        ("get", lambda found: [one[:1] for one in found], r"store\.get returned \[\(torch.float32, \(1,\)\)"),
    ],
)
def test_a_store_that_fails_is_named_with_the_step(run: Any, what: str, fault: Any, message: str) -> None:
    begin = "must come back as it was stored, but" if "returned" in message else "could not be"
    assert_fails(run, Recording(what, fault), rf"The state before step (\d+) {begin} {message}")


def test_a_state_that_is_not_dropped_is_an_error_of_bptt_and_a_warning_of_a_sweep(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A sweep's thread drops states when it has time, and the gradients are right without this."""
    message = r"The state before step \d+ could not be dropped under the key .*PermissionError\('no'\)"
    assert_fails(rolled, Recording("drop", raising(PermissionError("no"))), message)

    class Keeping(Recording):
        def drop(self, key: str) -> None:
            raise PermissionError("no")

    with caplog.at_level(logging.WARNING, logger="rmm_linear"):
        swept(initial(), Keeping()).sum().backward()
    assert "did not drop 7 states, the first 'sweep-" in caplog.text
    assert "PermissionError('no')" in caplog.text


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), TimeoutError()])
@pytest.mark.parametrize("what", ["put", "get"])
def test_no_error_ends_the_thread_of_a_sweep(what: str, error: BaseException) -> None:
    step = {"put": 12, "get": 16}[what]
    assert_fails(swept, Recording(what, raising(error)), rf"before step {step} could not be .*{type(error).__name__}")


@both
@pytest.mark.parametrize("at", ["forward", "backward"])
def test_a_step_that_fails(run: Any, at: str, tmp_path: Path) -> None:
    passes = []

    def advance(number: int, u: Tensor) -> Tensor:
        passes.append(number)
        if number == 20 and (at == "forward" or passes.count(20) > 1):
            raise ZeroDivisionError
        return step(number, u)

    assert_fails(lambda u, store: run(u, store, advance), tmp_path, None, ZeroDivisionError)


@both
def test_a_full_disk(run: Any, tmp_path: Path) -> None:
    """The kernel refuses a state of 16 KB: here by a limit of files' sizes, as on a disk that is full."""
    with full_disk(1 << 13):
        message = (
            r"The state before step (\d+) could not be stored: .*-0*\1\.safetensors cannot be written: .*Make room"
        )
        assert_fails(run, tmp_path, message)


def test_a_disk_that_becomes_full_at_the_last_state(tmp_path: Path) -> None:
    """The forward pass has ended before the error is known; the backward pass says so."""
    u, gone = initial(), tmp_path / "gone"

    def advance(number: int, u: Tensor) -> Tensor:
        if number == 27 and not gone.exists():
            while not (found := list(tmp_path.glob("rmm-*/*-00000024.safetensors"))):
                time.sleep(0.01)
            found[0].parent.rename(gone)
        return step(number, u)

    final = swept(u, tmp_path, advance)
    with pytest.raises(StoreError, match=r"before step 28 could not be stored: .* cannot be written: No such file"):
        final.sum().backward()
    assert u.grad is None


@both
@pytest.mark.parametrize(
    ("damage", "message"), [(Path.unlink, "cannot be read"), (lambda path: os.truncate(path, 100), "is damaged")]
)
def test_a_file_that_is_gone_or_damaged(run: Any, damage: Any, message: str, tmp_path: Path) -> None:
    def damaging(u: Tensor, store: Path) -> Tensor:
        final = run(u, store)
        damage(files(store)[2])
        return final

    assert_fails(damaging, tmp_path, rf"before step (\d+) could not be read: .*-0*\1\.safetensors {message}")


# Threads and processes


def test_the_thread_that_puts_also_drops_what_is_left() -> None:
    threads = set()

    class Watched(Recording):
        def called(self, what: str, key: str, found: Any = None) -> Any:
            threads.add(threading.get_ident())
            return super().called(what, key, found)

    store = Watched()
    final = swept(initial(), store)
    del final
    gc.collect()
    assert store.held == {}
    assert len(threads) == 1


def test_a_store_that_does_not_answer_is_not_called_by_a_second_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transfers, "_PATIENCE", 0.05)
    gate, stuck, inside = threading.Event(), threading.Event(), threading.Lock()

    class Stuck(Recording):
        def called(self, what: str, key: str, found: Any = None) -> Any:
            assert inside.acquire(blocking=False)
            if len(self.held) == 6:
                stuck.set()
                gate.wait(20)
            inside.release()
            return super().called(what, key, found)

    store = Stuck()
    with caplog.at_level(logging.WARNING, logger="rmm_linear"):
        final = swept(initial(), store)
        assert stuck.wait(20)  # what has not begun to be stored when a sweep is closed never is
        del final
        gc.collect()
    assert "has not answered for 0.05 s" in caplog.text
    assert store.held
    gate.set()
    for thread in [thread for thread in threading.enumerate() if thread.name == "rmm_linear-store"]:
        thread.join(20)
    assert store.held == {}


def test_a_slow_store_is_waited_for_as_long_as_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all, its drops last longer than the patience for each."""
    monkeypatch.setattr(transfers, "_PATIENCE", 1.0)  # seconds in which a busy machine comes back to one drop

    class Slow(Recording):
        def drop(self, key: str) -> None:
            time.sleep(0.2)
            super().drop(key)

    store = Slow()
    final = swept(initial(), store)
    while store.count("put") < 7:  # what has not begun to be stored when a sweep is closed never is
        time.sleep(0.01)
    del final
    gc.collect()
    assert store.held == {}


def test_no_more_states_are_on_their_way_than_two() -> None:
    gate, reached = threading.Event(), []
    store = Recording()
    store.put = lambda key, tensors: gate.wait(20) and None

    def advance(number: int, u: Tensor) -> Tensor:
        reached.append(number)
        return step(number, u)

    runner = threading.Thread(target=lambda: swept(initial(), store, advance))
    runner.start()
    while len(reached) < (IN_FLIGHT + 1) * INTERVAL:
        time.sleep(0.01)
    time.sleep(0.2)
    assert max(reached) == (IN_FLIGHT + 1) * INTERVAL - 1  # the next state has to wait
    gate.set()
    runner.join(20)
    assert max(reached) == STEPS - 1


def test_a_forked_process_drops_nothing_of_its_parent_and_has_no_backward_pass(tmp_path: Path) -> None:
    """The thread is its parent's."""

    class Files(Recording):
        def drop(self, key: str) -> None:
            (tmp_path / key).touch()
            super().drop(key)

    finals = [swept(initial(), Files())]

    def child() -> int:
        try:
            finals[0].sum().backward(retain_graph=True)
        except StoreError as error:
            finals.clear()
            gc.collect()
            return 0 if "thread that stores states has ended" in str(error) else 1
        return 2

    assert alone(child) == 0
    assert list(tmp_path.iterdir()) == []
    finals.pop().sum().backward()
    gc.collect()
    assert len(list(tmp_path.iterdir())) == 7
