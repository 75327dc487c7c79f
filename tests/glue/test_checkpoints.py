"""Checkpoints of the GLUE script: which of them count, and what is said of those that are damaged."""

import json
import os
import re
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from fault_helpers import at_write, in_a_child, kill
from glue_helpers import SignalTimer, fails, flags, results_of, write_cola
from transformers import TrainerControl, TrainerState, TrainingArguments

from glue_finetune import training
from glue_finetune.__main__ import main
from glue_finetune.checkpoints import (
    LOCK,
    SETTINGS_FILE,
    check_files,
    claimed,
    complete_checkpoints,
    mark_complete,
    remove_checkpoint,
)
from glue_finetune.errors import UserError
from glue_finetune.trainer import CheckpointFiles

STEPS = 3  # per epoch: 24 rows in batches of 8
SKETCH = {"kind": "wta", "norm_estimator": "position", "ratio": 0.3, "disable_tqdm": "true"}


@pytest.fixture(scope="module")
def cola(tmp_path_factory):
    return write_cola(tmp_path_factory.mktemp("cola"), train=8 * STEPS)


Killed = type("Killed", (SignalTimer,), {"step": 2 * STEPS + 2, "evaluation": None, "signum": signal.SIGKILL})


@pytest.fixture(scope="module")
def killed(model, cola, tmp_path_factory):
    """A run with two complete checkpoints."""
    run = tmp_path_factory.mktemp("killed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "StepTimer", Killed)
        argv = flags(model, cola, run, num_train_epochs=3, save_total_limit=2, **SKETCH)
        assert in_a_child(lambda: main(argv)) == -signal.SIGKILL
    assert [path.name for path in complete_checkpoints(run)] == [f"checkpoint-{n * STEPS}" for n in (1, 2)]
    return run


def resume(model, cola, run, checkpoint="last"):
    own = {"num_train_epochs": 3, "save_total_limit": 2, "resume_from_checkpoint": checkpoint}
    return flags(model, cola, run, **own, **SKETCH)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def flip(path):
    """One byte that no reader need notice."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_every_file_of_a_checkpoint_that_is_damaged_is_named(model, cola, tmp_path, killed, capsys):
    """One line, which names the file and the remedy; nothing changes, and the remedy helps."""
    run = Path(shutil.copytree(killed, tmp_path / "run"))
    checkpoint = complete_checkpoints(run)[-1]
    whole = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    names = ("config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
    assert {*names, SETTINGS_FILE, "sketch_state.json"} < set(whole)
    every = (cut, empty, flip, Path.unlink)
    for place, name in enumerate(whole):  # all that may happen to the largest file, and one thing after the other
        for damage in every if name == "model.safetensors" else (every[place % 4],):
            if name == SETTINGS_FILE and damage in (flip, Path.unlink):
                continue  # a flipped digit is a setting or a digest of another; without it there is no checkpoint
            damage(checkpoint / name)
            line = fails(capsys, resume(model, cola, run))
            assert f"{checkpoint / name} is damaged (" in line
            assert "Remove this checkpoint to go on from an earlier one" in line
            (checkpoint / name).write_bytes(whole[name])
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == whole
    shutil.rmtree(checkpoint)
    assert main(resume(model, cola, run)) == 0


def test_a_checkpoint_without_an_optimizer_is_complete_where_none_is_saved(model, cola, tmp_path):
    options = {"save_only_model": True, "num_train_epochs": 1, **SKETCH}
    assert main(flags(model, cola, tmp_path / "run", **options)) == 0
    (checkpoint,) = complete_checkpoints(tmp_path / "run")
    check_files(checkpoint)
    assert not (checkpoint / "optimizer.pt").exists()


@pytest.mark.parametrize("text", ["3", "{}", '{"settings": {}}', '{"settings": {}, "sha256": []}', "[" * 100_000])
def test_a_marker_of_another_form_is_refused(tmp_path, text):
    (tmp_path / SETTINGS_FILE).write_text(text)
    with pytest.raises(UserError, match=rf"{SETTINGS_FILE} is damaged"):
        check_files(tmp_path)


def test_files_in_folders_are_looked_at_too(tmp_path):
    """As sharded checkpoints have them."""
    (tmp_path / "optimizer_0").mkdir()
    (tmp_path / "optimizer_0" / "part").write_text("whole")
    mark_complete(tmp_path, {"seed": 1})
    check_files(tmp_path)
    assert list(json.loads((tmp_path / SETTINGS_FILE).read_text())["sha256"]) == ["optimizer_0/part"]
    (tmp_path / "optimizer_0" / "part").write_text("other")
    with pytest.raises(UserError, match="part is damaged"):
        check_files(tmp_path)


# What cannot be resumed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--resume_from_checkpoint", "last", "--ratio", "0.5"], "sketch was {.*'ratio': 0.3"),
        (["--resume_from_checkpoint", "last", "--learning_rate", "1"], "learning_rate was 0.001, now 1"),
        (["--resume_from_checkpoint", "/nowhere"], "must be a checkpoint of this script; /nowhere has no"),
        ([], "must be empty, got .* --resume_from_checkpoint last, or .* --overwrite_output_dir"),
    ],
)
def test_what_cannot_be_resumed_is_refused_and_left_as_it_is(model, cola, killed, capsys, more, message):
    before = files_of(killed)
    argv = flags(model, cola, killed, num_train_epochs=3, save_total_limit=2, **SKETCH)
    assert re.search(message, fails(capsys, [*argv, *more]))
    assert files_of(killed) == before


def test_a_finished_run_is_not_resumed_but_can_be_overwritten(model, cola, tmp_path, capsys):
    argv = flags(model, cola, tmp_path / "run", num_train_epochs=1)
    assert "has none" in fails(capsys, [*argv, "--resume_from_checkpoint", "last"])
    assert not (tmp_path / "run").exists()
    assert main(argv) == 0
    assert "is finished" in fails(capsys, [*argv, "--resume_from_checkpoint", "last"])
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert main([*argv, "--num_train_epochs", "2", "--overwrite_output_dir"]) == 0
    assert len(results_of(tmp_path / "run")["epochs"]) == 2
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == [f"checkpoint-{2 * STEPS}"]
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


# Removal


def test_what_is_removed_stops_to_count_before_its_first_file_is_gone(tmp_path, killed, monkeypatch):
    """Killed at any file: what still counts is whole. The order within the folder is the file system's."""
    number, status, left = 0, 1, []
    while status:
        checkpoint = Path(shutil.copytree(complete_checkpoints(killed)[-1], tmp_path / f"checkpoint-{number}"))

        def remove(checkpoint=checkpoint, number=number):
            with monkeypatch.context() as patch:
                at_write(patch, number, kill)
                remove_checkpoint(checkpoint)
            return 0

        status = in_a_child(remove)
        left.append(len(list(checkpoint.iterdir())) if status else 0)
        for path in complete_checkpoints(tmp_path):
            check_files(path)
        number += 1
    assert len(set(left)) > 5  # it was killed in the middle


@pytest.mark.parametrize("where", ["overwritten", "rotated"])
def test_a_run_that_is_killed_while_it_removes_leaves_no_half_of_a_checkpoint_that_counts(
    model, cola, tmp_path, killed, monkeypatch, where
):
    run = Path(shutil.copytree(killed, tmp_path / "run"))

    def dying(path, *args, **kwargs):
        (Path(path) / "optimizer.pt").unlink()
        kill()

    more = ["--overwrite_output_dir"] if where == "overwritten" else ["--resume_from_checkpoint", "last"]
    argv = [*flags(model, cola, run, num_train_epochs=3, save_total_limit=2, **SKETCH), *more]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", dying)
        assert in_a_child(lambda: main(argv)) == -signal.SIGKILL
    assert [path for path in run.glob("checkpoint-*") if not (path / "optimizer.pt").exists()]
    for path in complete_checkpoints(run):
        check_files(path)
    assert main(resume(model, cola, run)) == 0


# Two runs, one after the other


@pytest.mark.parametrize(
    ("resuming", "finishes", "message"),
    [
        (False, True, "output_dir must be empty"),
        (True, True, "is finished"),
        (True, False, "Another run has just written into output_dir"),
    ],
    ids=["new", "resumed", "gone on"],
)
def test_a_run_that_finds_the_folder_changed_when_it_is_its_turn_does_not_write_over_it(
    model, cola, tmp_path, killed, monkeypatch, capsys, resuming, finishes, message
):
    """Another one has the folder after this one has looked at it, and before it claims it."""
    run, seen = tmp_path / "run", {}
    if resuming:
        shutil.copytree(killed, run)
    argv = resume(model, cola, run) if resuming else flags(model, cola, run, num_train_epochs=3, **SKETCH)

    @contextmanager
    def late(folder):
        if finishes:
            with monkeypatch.context() as patch:
                patch.setattr(training, "claimed", claimed)
                assert in_a_child(lambda: main(argv)) == 0
        else:
            complete_checkpoints(run)[-1].rename(run / f"checkpoint-{2 * STEPS + 1}")
        seen.update(files_of(run))
        with claimed(folder):
            yield

    monkeypatch.setattr(training, "claimed", late)
    assert message in fails(capsys, argv)
    assert files_of(run) == seen
    assert len(seen) > 5


def files_of(folder):
    """All but the lock, which stays where a run was killed."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK}


def test_the_best_checkpoint_stays_however_the_folder_is_written(tmp_path, monkeypatch):
    """The Trainer joins names, and keeps the "./" that a path has lost."""
    monkeypatch.chdir(tmp_path)
    args = TrainingArguments("./out", save_total_limit=1, use_cpu=True, report_to="none")
    for step in (5, 10):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "weights").write_text("weights")
        state = TrainerState(global_step=step, best_model_checkpoint="./out/checkpoint-5")
        CheckpointFiles({}).on_save(args, state, TrainerControl())
    assert {path.name for path in complete_checkpoints(Path("out"))} == {"checkpoint-5", "checkpoint-10"}
