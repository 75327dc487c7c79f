"""Files of states: format and digests; folders of runs that live, have ended or were killed, and what stays in them."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_helpers import full_disk, in_a_child, kill
from safetensors import safe_open
from torch import Tensor

from rmm_linear.planning import StoreError, bptt, open_store, sweep
from rmm_linear.planning.stores import folder as store_folder

fcntl = pytest.importorskip("fcntl")

TENSORS = [
    torch.randn(3, 4),
    torch.randn(2, 0, 3),
    torch.tensor(7),
    torch.randn(5).bfloat16(),
    torch.tensor([True, False]),
    torch.randn(2, 2, dtype=torch.float64),
    torch.randn(3, dtype=torch.complex128),
    torch.arange(6, dtype=torch.uint8),
]
PLAIN = [tensor for tensor in TENSORS if tensor.dtype != torch.complex128]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    store: Any = open_store(tmp_path)
    yield store
    store.close()
    assert list(tmp_path.iterdir()) == []


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )


def test_tensors_come_back_as_they_were(store: Any) -> None:
    store.put("sweep-1", TENSORS)
    store.put("sweep-2", [torch.zeros(2)])
    assert same(store.get("sweep-1"), TENSORS)
    with torch.device("meta"):  # they come to the CPU whatever the default device is
        assert same(store.get("sweep-1"), TENSORS)
    store.drop("sweep-1")
    assert not store.path("sweep-1").exists()
    assert same(store.get("sweep-2"), [torch.zeros(2)])


def test_files_are_safetensors(store: Any) -> None:
    store.put("sweep-1", PLAIN)
    with safe_open(store.path("sweep-1"), framework="pt") as file:
        assert same([file.get_tensor(name) for name in sorted(file.keys())], PLAIN)
        assert len(file.metadata()["sha256"]) == 64


def written(path: Path, begin: int, text: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[begin : begin + len(text)] = text
    path.write_bytes(content)


NOT_A_LAYOUT = json.dumps({"__metadata__": {"layout": '[["nn", [1]]]'}}).encode()
DAMAGES = {
    "last byte": lambda path: written(path, path.stat().st_size - 1, b"\xaa"),
    "shape": lambda path: path.write_bytes(path.read_bytes().replace(b"[3, 4]", b"[4, 3]")),  # of the same bytes
    "header": lambda path: written(path, 0, b"\xff" * 8),
    "json": lambda path: written(path, 8, b"oops"),
    "layout": lambda path: path.write_bytes(len(NOT_A_LAYOUT).to_bytes(8, "little") + NOT_A_LAYOUT),
    "end": lambda path: os.truncate(path, path.stat().st_size - 1),
    "most": lambda path: os.truncate(path, 3),
    "empty": lambda path: os.truncate(path, 0),
    "another state": lambda path: path.write_bytes(path.with_name("sweep-2.safetensors").read_bytes()),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_found(damage: Any, store: Any) -> None:
    store.put("sweep-1", TENSORS)
    store.put("sweep-2", TENSORS)
    damage(store.path("sweep-1"))
    with pytest.raises(StoreError, match=r"sweep-1\.safetensors is damaged: .*Leave the folder alone"):
        store.get("sweep-1")
    assert same(store.get("sweep-2"), TENSORS)


def test_a_missing_file_is_named(store: Any) -> None:
    store.put("sweep-1", TENSORS)
    store.path("sweep-1").unlink()
    with pytest.raises(StoreError, match=r"sweep-1\.safetensors cannot be read: No such file"):
        store.get("sweep-1")


def test_a_digest_knows_its_key(store: Any) -> None:
    store.put("state-3", TENSORS)
    shutil.copy(store.path("state-3"), store.path("state-4"))
    with pytest.raises(StoreError, match="digest"):
        store.get("state-4")


def test_nothing_is_left_of_a_file_for_which_there_is_no_room(store: Any) -> None:
    store.put("sweep-1", TENSORS)
    with full_disk(4096), pytest.raises(StoreError, match=r"sweep-2\.safetensors cannot be written: File too large"):
        store.put("sweep-2", [torch.zeros(4096)])
    assert [path.name for path in store.path("sweep-1").parent.iterdir()] == ["sweep-1.safetensors"]
    assert same(store.get("sweep-1"), TENSORS)


def abandoned(folder: Path) -> Path:
    """Return the folder of a run that was killed."""

    def run() -> int:
        store = open_store(folder)
        store.put("sweep-1", TENSORS)
        kill()
        return 0

    assert in_a_child(run) == -9
    (path,) = (path for path in folder.glob("rmm-*") if path.is_dir())
    return path


def open_and_close(folder: Path) -> None:
    store: Any = open_store(folder)
    store.close()


def test_the_next_run_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    left = abandoned(tmp_path)
    assert [path.name for path in left.iterdir()] == ["sweep-1.safetensors"]
    (left / "sweep-2.part").write_text("")
    (left / "notes.txt").write_text("the user's")
    open_and_close(tmp_path)
    assert names(tmp_path) == [left.name, f"{left.name}.lock", f"{left.name}/notes.txt"]  # known until it is gone
    (left / "notes.txt").unlink()
    open_and_close(tmp_path)
    assert names(tmp_path) == []


def test_a_run_leaves_those_that_live_alone(tmp_path: Path) -> None:
    """Of this process and of another one."""
    mine: Any = open_store(tmp_path)
    mine.put("sweep-1", TENSORS)
    assert in_a_child(lambda: use(tmp_path)) == 0
    again: Any = open_store(tmp_path)
    again.put("sweep-1", PLAIN)
    assert same(mine.get("sweep-1"), TENSORS)
    mine.close()
    assert same(again.get("sweep-1"), PLAIN)
    again.close()
    assert list(tmp_path.iterdir()) == []


def use(folder: Path) -> int:
    store: Any = open_store(folder)
    store.put("sweep-1", PLAIN)
    found = same(store.get("sweep-1"), PLAIN)
    store.close()
    return 0 if found else 1


def test_a_forked_process_does_not_remove_its_parents_files(tmp_path: Path) -> None:
    stores: list[Any] = [open_store(tmp_path)]
    stores[0].put("sweep-1", TENSORS)

    def forget() -> int:
        stores.clear()
        gc.collect()
        return 0

    assert in_a_child(forget) == 0
    assert same(stores[0].get("sweep-1"), TENSORS)
    forget()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_with_an_error_leaves_nothing(tmp_path: Path) -> None:
    """A store, a sweep and an offloaded block are alive when the interpreter ends."""
    code = (
        "import pathlib, sys, torch\n"
        "from rmm_linear.planning import BlockPlan, PlannedBlock, open_store, sweep\n"
        "store = open_store(sys.argv[1])\n"
        "store.put('sweep-1', [torch.ones(3)])\n"
        "u = torch.ones(3, requires_grad=True)\n"
        "final = sweep(lambda i, u: u * 2, u, 50, slots=2, store=sys.argv[1], interval=3)\n"
        "block = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))\n"
        "model = torch.nn.Sequential(block)\n"
        "BlockPlan([PlannedBlock('0', 'offload')], folder=sys.argv[1]).apply(model)\n"
        "output = model(torch.ones(512, 64))\n"
        "assert len([*pathlib.Path(sys.argv[1]).glob('rmm-*/offload*')]) == 2\n"
        "raise SystemExit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["rmm-linear", "rmm-0123456789abc", "rmm-0123456789AB", "rmm-0123456789ab"])
@pytest.mark.parametrize("text", ["", "mine"])
def test_a_users_folder_beside_a_users_lock_stays(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "model.safetensors").write_text("the user's")
    (tmp_path / f"{name}.lock").write_text(text)
    before = names(tmp_path)
    open_and_close(tmp_path)
    assert names(tmp_path) == before


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "folder"
    elsewhere.mkdir()
    (elsewhere / "model.safetensors").write_text("the user's")
    left = abandoned(folder)
    (left / "sweep-1.safetensors").unlink()
    left.rmdir()
    left.symlink_to(elsewhere)
    open_and_close(folder)
    assert names(elsewhere) == ["model.safetensors"]


def test_a_run_on_another_host_stays_where_locks_are_for_one_host_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network filesystem that does not pass locks on: whoever asks for one gets it."""
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: None)
    mine: Any = open_store(tmp_path)
    mine.put("sweep-1", PLAIN)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(store_folder.socket, "gethostname", lambda: "another-host")
        open_and_close(tmp_path)
    assert same(mine.get("sweep-1"), PLAIN)
    mine.close()
    assert names(tmp_path) == []


def test_a_filesystem_without_locks_is_an_error_that_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(StoreError, match=r"rmm-\w{12}\.lock must be made and locked, got: No locks .* local disk"):
        open_store(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("inside", ["", "folder", "folder/deeper"])
@pytest.mark.parametrize("steps", [1, 20])
@pytest.mark.parametrize("grad", [True, False])
def test_a_store_that_is_a_file_or_below_one_is_refused_before_anything_runs(tmp_path, inside, steps, grad):
    file = tmp_path / "file"
    file.write_text("the user's")
    calls, path, u = [], file / inside, torch.ones(3, requires_grad=grad)

    def step(number, u):
        calls.append(number)
        return torch.sin(u)

    for run in (
        lambda: open_store(path),
        lambda: sweep(step, u, steps, slots=2, store=path),
        lambda: bptt(lambda x, h: (None, step(0, h)), torch.zeros(20, 1), u, slots=2, internal=False, store=path),
    ):
        with torch.set_grad_enabled(grad), pytest.raises(StoreError, match=r"a folder.*file.*Give another folder"):
            run()
    assert calls == []
    assert file.read_text() == "the user's"
    assert [*tmp_path.iterdir()] == [file]
