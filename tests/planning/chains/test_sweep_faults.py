"""Faults while a sweep runs: one error that names step and file, no hang, no gradient, nothing left in the folder."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_helpers import full_disk
from planning_helpers import Recording
from sweep_fault_helpers import SIZE, Failing, file_of, initial, is_tidy, run, step
from torch import Tensor

from rmm_linear.planning import StoreError


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
        from rmm_linear.planning import StoreError, sweep
        from rmm_linear.planning.stores import files as store_files
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
    # The outer shell makes a missing unshare an exit status.
    done = subprocess.run(
        ["sh", "-c", 'unshare -rm sh -c "$0"', mounted], env=environment, capture_output=True, text=True, check=False
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
