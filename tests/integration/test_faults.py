"""Faults: killed processes, full disks, damaged files, two runs in one folder: what was complete stays."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from fault_helpers import full_disk, in_a_child, kill
from glue_helpers import fails, flags, results_of, same_weights, write_cola

from glue_finetune import compare, training
from glue_finetune import trainer as trainers
from glue_finetune.__main__ import main
from glue_finetune.checkpoints import claimed, complete_checkpoints, mark_complete, read_settings, write_json
from glue_finetune.trainer import CheckpointFiles, GlueTrainer, StepTimer
from rmm_linear import RMMConfig
from rmm_linear.integrations.checkpoints import STATE_FILE
from rmm_linear.integrations.pretrained import save_conversion

STEPS = 6  # per epoch
SKETCH: dict[str, Any] = {"kind": "countsketch", "memory": 0.5, "bits": "auto", "seed": 7, "disable_tqdm": "true"}


@pytest.fixture(scope="module")
def cola(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cola(tmp_path_factory.mktemp("cola"), train=8 * STEPS)


@pytest.fixture(scope="module")
def uninterrupted(model: Path, cola: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "run"
    assert main(flags(model, cola, output, **SKETCH)) == 0
    return output


class InTheMiddle(StepTimer):
    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_step_begin(*args, **kwargs)
        if args[1].global_step == STEPS + 2:
            kill()


class WhileSavingTheModel(GlueTrainer):
    def _save_optimizer_and_scheduler(self, output_dir: Any) -> None:
        if self.state.global_step == 2 * STEPS:
            kill()
        super()._save_optimizer_and_scheduler(output_dir)


class BeforeTheLastFile(CheckpointFiles):
    def on_save(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
        if state.global_step == 2 * STEPS:
            kill()
        super().on_save(args, state, *more, **kwargs)


@pytest.mark.parametrize(
    "killer",
    [("StepTimer", InTheMiddle), ("GlueTrainer", WhileSavingTheModel), ("CheckpointFiles", BeforeTheLastFile)],
    ids=["training", "saving", "almost saved"],
)
def test_a_killed_run_goes_on_from_its_last_complete_checkpoint(
    model: Path,
    cola: Path,
    tmp_path: Path,
    uninterrupted: Path,
    monkeypatch: pytest.MonkeyPatch,
    killer: tuple[str, type],
) -> None:
    """SIGKILL lets nothing be tidied up. The resumed run ends with the weights of the uninterrupted one."""
    argv = flags(model, cola, tmp_path / "run", **SKETCH)
    with monkeypatch.context() as patch:
        patch.setattr(training, *killer)
        assert in_a_child(lambda: main(argv)) == -signal.SIGKILL
    assert not (tmp_path / "run" / "results.json").exists()
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == [f"checkpoint-{STEPS}"]
    assert main([*argv, "--resume_from_checkpoint", "last"]) == 0
    assert same_weights(tmp_path / "run", uninterrupted)
    assert results_of(tmp_path / "run")["score"] == results_of(uninterrupted)["score"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_json(path, {"old": 1})
    with full_disk(1000), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        write_json(path, {"new": "x" * 10_000})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.json"]


def test_a_disk_that_fills_up_ends_the_run_with_one_line_and_keeps_what_was_complete(
    model: Path,
    cola: Path,
    tmp_path: Path,
    uninterrupted: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second checkpoint does not fit; with room again, the run goes on from the first."""

    class NoRoom(GlueTrainer):
        def _save_checkpoint(self, *args: Any) -> None:
            with full_disk(5000 if self.state.global_step > STEPS else 1 << 40):
                super()._save_checkpoint(*args)

    argv = flags(model, cola, tmp_path / "run", **SKETCH)
    with monkeypatch.context() as patch:
        patch.setattr(training, "GlueTrainer", NoRoom)
        line = fails(capsys, argv)
    assert f"Cannot save {tmp_path / 'run' / f'checkpoint-{2 * STEPS}'}" in line
    assert "go on with --resume_from_checkpoint last" in line
    assert [path.name for path in (tmp_path / "run").glob("*")] == [f"checkpoint-{STEPS}"]
    assert main([*argv, "--resume_from_checkpoint", "last"]) == 0
    assert same_weights(tmp_path / "run", uninterrupted)


def test_results_that_do_not_fit_end_the_run_with_one_line_and_come_when_there_is_room(
    model: Path,
    cola: Path,
    tmp_path: Path,
    uninterrupted: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Training was complete: its weights and checkpoint stay, and no half of the results."""

    def no_room(path: Path, content: Any) -> None:
        with full_disk(100):
            write_json(path, content)

    run = tmp_path / "run"
    argv = flags(model, cola, run, **SKETCH)
    with monkeypatch.context() as patch:
        patch.setattr(training, "write_json", no_room)
        line = fails(capsys, argv)
    assert f"Cannot save {run / 'results.json'}" in line
    assert not [path.name for path in run.iterdir() if "results" in path.name]
    assert same_weights(run, uninterrupted)
    assert main([*argv, "--resume_from_checkpoint", "last"]) == 0
    assert same_weights(run, uninterrupted)
    assert results_of(run)["score"] == results_of(uninterrupted)["score"]


@pytest.mark.parametrize("room", [5000, 300], ids=["weights", "conversion"])
def test_a_final_model_that_does_not_fit_ends_the_run_with_one_line_and_comes_when_there_is_room(
    model: Path,
    cola: Path,
    tmp_path: Path,
    uninterrupted: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    room: int,
) -> None:
    """The checkpoint of the last step is complete; what is saved of it for use is not."""

    class NoRoom(GlueTrainer):
        def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
            with full_disk(room if room > 1000 and not _internal_call else 1 << 40):
                super().save_model(output_dir, _internal_call)

    def save(*args: Any) -> None:
        with full_disk(room if room < 1000 else 1 << 40):
            save_conversion(*args)

    run = tmp_path / "run"
    argv = flags(model, cola, run, **SKETCH)
    with monkeypatch.context() as patch:
        patch.setattr(training, "GlueTrainer", NoRoom)
        patch.setattr(training, "save_conversion", save)
        line = fails(capsys, argv)
    assert f"Cannot save {run}: " in line
    assert os.strerror(errno.EFBIG) in line
    assert not (run / "results.json").exists()
    assert not (run / "rmm_config.json").exists()
    assert [path.name for path in complete_checkpoints(run)] == [f"checkpoint-{2 * STEPS}"]
    assert main([*argv, "--resume_from_checkpoint", "last"]) == 0
    assert same_weights(run, uninterrupted)
    assert (run / "rmm_config.json").read_bytes() == (uninterrupted / "rmm_config.json").read_bytes()


def test_a_comparison_on_a_full_disk_ends_with_one_line_and_comes_when_there_is_room(
    model: Path, cola: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its list of settings, its table and its picture: 10, 200 and 10,000 bytes are too few for one after another."""
    monkeypatch.setattr(compare, "run_process", lambda argv: main(list(argv)))
    out = tmp_path / "out"
    argv = flags(model, cola, out, disable_tqdm="true", max_steps=1, compare=["exact", "rows:0.5"])
    with full_disk(10):
        line = fails(capsys, argv)
    assert f"Cannot save {out / 'comparison.json'}: " in line
    assert list(out.iterdir()) == []
    assert main(argv) == 0
    files = {path.name: path.read_bytes() for path in out.glob("comparison.*")}
    assert sorted(files) == [f"comparison.{suffix}" for suffix in ("csv", "json", "md", "png")]
    for room, left in ((200, 1), (10_000, 3)):
        for name in files:
            if name != "comparison.json":
                (out / name).unlink(missing_ok=True)
        with full_disk(room):
            line = fails(capsys, argv)
        assert f"Cannot save {out}: " in line
        assert "Make room, then give the same command; finished runs are kept." in line
        assert len(list(out.glob("comparison.*"))) == left
    assert main(argv) == 0
    assert {path.name for path in out.glob("comparison.*")} == set(files)


@pytest.mark.parametrize("damage", [lambda text: text[: len(text) // 2], lambda text: "", lambda text: '{"layers": 3}'])
def test_a_damaged_sketch_state_is_named(
    model: Path, cola: Path, tmp_path: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str], damage: Any
) -> None:
    run = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    (run / "results.json").unlink()
    (checkpoint,) = complete_checkpoints(run)
    (checkpoint / STATE_FILE).write_text(damage((checkpoint / STATE_FILE).read_text()))
    mark_complete(checkpoint, read_settings(checkpoint))  # as if it had been written so
    line = fails(capsys, [*flags(model, cola, run, **SKETCH), "--resume_from_checkpoint", "last"])
    assert "Cannot resume: " in line
    assert str(checkpoint / STATE_FILE) in line


@pytest.mark.parametrize("damage", ['{"ratio": 0.', "[]", '{"ratio": 7}', '{"who": 1}', "\x80"])
def test_a_damaged_configuration_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "rmm_config.json"
    path.write_bytes(damage.encode("latin-1"))
    with pytest.raises(ValueError, match=r"rmm_config.json is not a valid RMMConfig"):
        RMMConfig.load(path)


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_goes_on(
    model: Path,
    cola: Path,
    tmp_path: Path,
    uninterrupted: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = flags(model, cola, tmp_path / "run", **SKETCH)
    said: list[str] = []

    def second() -> int:
        with open(tmp_path / "said", "w") as file, contextlib.redirect_stderr(file):
            return main([*argv, "--overwrite_output_dir"])

    class Meanwhile(StepTimer):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            super().on_step_begin(*args, **kwargs)
            if args[1].global_step == 1:
                assert in_a_child(second) == 2
                said.append((tmp_path / "said").read_text())

    with monkeypatch.context() as patch:
        patch.setattr(training, "StepTimer", Meanwhile)
        assert main(argv) == 0
    assert said == [
        f"glue_finetune: error: Another run is writing into output_dir {tmp_path / 'run'}. "
        "Choose another one, or wait.\n"
    ]
    assert same_weights(tmp_path / "run", uninterrupted)
    with claimed(tmp_path / "run"):  # free again
        pass


def test_a_killed_run_gives_its_folder_back(tmp_path: Path) -> None:
    def run() -> int:
        with claimed(tmp_path):
            kill()
        return 0

    assert in_a_child(run) == -signal.SIGKILL
    with claimed(tmp_path):
        pass


def test_the_kills_of_this_file_are_at_places_that_exist() -> None:
    """They reach into transformers' Trainer, which may call these parts otherwise one day."""
    assert hasattr(trainers.Trainer, "_save_optimizer_and_scheduler")
    assert hasattr(trainers.Trainer, "_save_checkpoint")
