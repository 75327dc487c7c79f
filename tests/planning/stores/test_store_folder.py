"""What a store's folder removes: its own files, never a user's, another host's or a living run's."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_helpers import in_a_child, kill

from rmm_linear.planning import StoreError, bptt, open_store, sweep
from rmm_linear.planning.stores import folder as store_folder

fcntl = pytest.importorskip("fcntl")

TENSORS = [torch.arange(3)]


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


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


@pytest.mark.parametrize("name", ["rmm-linear", "rmm-0123456789abc", "rmm-0123456789AB", "rmm-0123456789ab"])
@pytest.mark.parametrize("text", ["", "mine"])
def test_a_users_folder_beside_a_users_lock_stays(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "model.safetensors").write_text("the user's")
    (tmp_path / f"{name}.lock").write_text(text)
    before = names(tmp_path)
    open_and_close(tmp_path)
    assert names(tmp_path) == before


def test_what_no_store_writes_stays_and_the_folder_is_known_until_it_is_gone(tmp_path: Path) -> None:
    left = abandoned(tmp_path)
    (left / "sweep-2.part").write_text("")
    (left / "notes.txt").write_text("the user's")
    open_and_close(tmp_path)
    assert names(tmp_path) == [left.name, f"{left.name}.lock", f"{left.name}/notes.txt"]
    (left / "notes.txt").unlink()
    open_and_close(tmp_path)
    assert names(tmp_path) == []


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
    mine.put("sweep-1", TENSORS)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(store_folder.socket, "gethostname", lambda: "another-host")
        open_and_close(tmp_path)
    assert torch.equal(mine.get("sweep-1")[0], TENSORS[0])
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
def test_a_store_that_is_a_file_or_below_one_is_refused_before_anything_runs(tmp_path, inside):
    file = tmp_path / "file"
    file.write_text("kept")
    calls, path = [], file / inside

    def step(number, u):
        calls.append(number)
        return torch.sin(u)

    u = torch.ones(3, requires_grad=True)
    for run in (
        lambda: open_store(path),
        lambda: sweep(step, u, 20, slots=2, store=path),
        lambda: bptt(lambda x, h: (None, step(0, h)), torch.zeros(20, 1), u, slots=2, internal=False, store=path),
    ):
        with pytest.raises(StoreError, match=r"store must be a folder.*file.*Give another folder"):
            run()
    assert calls == []
    assert file.read_text() == "kept"
    assert [*tmp_path.iterdir()] == [file]
