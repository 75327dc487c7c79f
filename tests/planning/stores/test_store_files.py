"""Files of states: their format, their digests, and the folders of runs that live, have ended, or were killed."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_helpers import full_disk, in_a_child, kill
from safetensors import safe_open
from torch import Tensor

from rmm_linear.planning import StoreError, open_store

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


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )


def test_tensors_come_back_as_they_were(store: Any) -> None:
    store.put("sweep-1", TENSORS)
    store.put("sweep-2", [torch.zeros(2)])
    assert same(store.get("sweep-1"), TENSORS)
    assert same(store.get("sweep-1"), TENSORS)
    store.drop("sweep-1")
    assert not store.path("sweep-1").exists()
    assert same(store.get("sweep-2"), [torch.zeros(2)])


def test_tensors_come_back_to_the_cpu_whatever_the_default_device_is(store: Any) -> None:
    store.put("sweep-1", TENSORS)
    with torch.device("meta"):
        assert same(store.get("sweep-1"), TENSORS)


def test_files_are_safetensors(store: Any) -> None:
    store.put("sweep-1", PLAIN)
    with safe_open(store.path("sweep-1"), framework="pt") as file:
        assert same([file.get_tensor(name) for name in sorted(file.keys())], PLAIN)
        assert len(file.metadata()["sha256"]) == 64


def damage_tensor(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def damage_shape(path: Path) -> None:
    """The bytes are the same, and mean another tensor."""
    content = path.read_bytes()
    path.write_bytes(content.replace(b"[3, 4]", b"[4, 3]"))


def damage_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def damage_json(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8:12] = b"oops"
    path.write_bytes(content)


def replace_by_json(path: Path) -> None:
    text = json.dumps({"__metadata__": {"layout": '[["nn", [1]]]'}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def replace_by_another(path: Path) -> None:
    """A whole file, of another state."""
    path.write_bytes(path.with_name("sweep-2.safetensors").read_bytes())


@pytest.mark.parametrize(
    "damage",
    [damage_tensor, damage_shape, damage_header, damage_json, replace_by_json, shorten, empty, replace_by_another],
)
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


def test_nothing_is_left_of_a_file_for_which_there_is_no_room(store: Any) -> None:
    store.put("sweep-1", TENSORS)
    with full_disk(4096), pytest.raises(StoreError, match=r"sweep-2\.safetensors cannot be written: File too large"):
        store.put("sweep-2", [torch.zeros(4096)])
    assert [path.name for path in store.path("sweep-1").parent.iterdir()] == ["sweep-1.safetensors"]
    assert same(store.get("sweep-1"), TENSORS)


def test_a_store_that_is_forgotten_is_removed(tmp_path: Path) -> None:
    open_store(tmp_path).put("sweep-1", TENSORS)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_the_next_run_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    def run() -> int:
        store = open_store(tmp_path)
        store.put("sweep-1", TENSORS)
        kill()
        return 0

    (tmp_path / "notes.txt").write_text("the user's")
    (tmp_path / "rmm-mine").mkdir()
    assert in_a_child(run) == -9
    left = [path for path in tmp_path.glob("rmm-*/*")]
    assert [path.name for path in left] == ["sweep-1.safetensors"]
    store: Any = open_store(tmp_path)
    assert not left[0].parent.exists()
    store.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "rmm-mine"]


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


def test_a_process_that_ends_with_an_error_leaves_nothing(tmp_path: Path) -> None:
    """The store is alive when the interpreter ends."""
    code = (
        "import sys, torch\n"
        "from rmm_linear.planning import open_store, sweep\n"
        "store = open_store(sys.argv[1])\n"
        "store.put('sweep-1', [torch.ones(3)])\n"
        "u = torch.ones(3, requires_grad=True)\n"
        "final = sweep(lambda i, u: u * 2, u, 50, slots=2, store=sys.argv[1], interval=3)\n"
        "raise SystemExit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 3
    assert list(tmp_path.iterdir()) == []
