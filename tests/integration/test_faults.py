"""Faults: killed processes, full disks, damaged files, two runs in one folder: what was complete stays."""

import contextlib
import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
from fault_helpers import full_disk, in_a_child, kill
from glue_helpers import SignalTimer, fails, flags, results_of, same_weights

from glue_finetune import compare, training
from glue_finetune.__main__ import main
from glue_finetune.checkpoints import claimed, complete_checkpoints, mark_complete, read_settings, write_json
from glue_finetune.trainer import CheckpointFiles, GlueTrainer, StepTimer
from rmm_linear.integrations.checkpoints import STATE_FILE
from rmm_linear.integrations.pretrained import save_conversion

STEPS = 6  # per epoch
SKETCH = {"kind": "countsketch", "memory": 0.5, "bits": "auto", "seed": 7, "disable_tqdm": "true"}


@pytest.fixture(scope="module")
def uninterrupted(model, cola, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "run"
    assert main(flags(model, cola, output, **SKETCH)) == 0
    return output


InTheMiddle = type("InTheMiddle", (SignalTimer,), {"step": STEPS + 3, "evaluation": None, "signum": signal.SIGKILL})


class WhileSavingTheModel(GlueTrainer):
    def _save_optimizer_and_scheduler(self, output_dir):
        if self.state.global_step == 2 * STEPS:
            kill()
        super()._save_optimizer_and_scheduler(output_dir)


class BeforeTheLastFile(CheckpointFiles):
    def on_save(self, args, state, *more, **kwargs):
        if state.global_step == 2 * STEPS:
            kill()
        super().on_save(args, state, *more, **kwargs)


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    "killer",
    [
        pytest.param(("StepTimer", InTheMiddle), marks=pytest.mark.thorough),
        ("GlueTrainer", WhileSavingTheModel),
        ("CheckpointFiles", BeforeTheLastFile),
    ],
    ids=["training", "saving", "almost saved"],
)
def test_a_killed_run_goes_on_from_its_last_complete_checkpoint(
    model, cola, tmp_path, uninterrupted, monkeypatch, killer
):
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


def limited(room):
    return contextlib.nullcontext() if room is None else full_disk(room)


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    "what",
    ["checkpoint", *(pytest.param(what, marks=pytest.mark.thorough) for what in ("weights", "conversion")), "results"],
)
def test_a_disk_that_fills_up_ends_the_run_with_one_line_and_it_goes_on_when_there_is_room(
    model, cola, tmp_path, uninterrupted, monkeypatch, capsys, what
):
    """What was complete stays; of what did not fit there is no half."""

    class NoRoom(GlueTrainer):
        def _save_checkpoint(self, *args):
            with limited(5000 if what == "checkpoint" and self.state.global_step > STEPS else None):
                super()._save_checkpoint(*args)

        def save_model(self, output_dir=None, _internal_call=False):
            with limited(5000 if what == "weights" and not _internal_call else None):
                super().save_model(output_dir, _internal_call)

    def save(*args):
        with limited(300 if what == "conversion" else None):
            save_conversion(*args)

    def write(path, content):
        with limited(100 if what == "results" else None):
            write_json(path, content)

    run = tmp_path / "run"
    argv = flags(model, cola, run, **SKETCH)
    with monkeypatch.context() as patch:
        for name, change in (("GlueTrainer", NoRoom), ("save_conversion", save), ("write_json", write)):
            patch.setattr(training, name, change)
        line = fails(capsys, argv)
    place = {"checkpoint": run / f"checkpoint-{2 * STEPS}", "results": run / "results.json"}.get(what, run)
    assert f"Cannot save {place}: " in line
    assert os.strerror(errno.EFBIG) in line or what == "checkpoint"
    assert "go on with --resume_from_checkpoint last" in line
    complete = f"checkpoint-{STEPS if what == 'checkpoint' else 2 * STEPS}"
    assert [path.name for path in run.glob("checkpoint-*")] == [complete]
    assert not [path.name for path in run.iterdir() if "results" in path.name]
    assert (run / "rmm_config.json").exists() == (what == "results")
    assert main([*argv, "--resume_from_checkpoint", "last"]) == 0
    assert same_weights(run, uninterrupted)
    assert results_of(run)["score"] == results_of(uninterrupted)["score"]
    assert (run / "rmm_config.json").read_bytes() == (uninterrupted / "rmm_config.json").read_bytes()


def test_a_comparison_on_a_full_disk_ends_with_one_line_and_comes_when_there_is_room(
    model, cola, tmp_path, monkeypatch, capsys
):
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
def test_a_damaged_sketch_state_is_named(model, cola, tmp_path, uninterrupted, capsys, damage):
    run = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    (run / "results.json").unlink()
    (checkpoint,) = complete_checkpoints(run)
    (checkpoint / STATE_FILE).write_text(damage((checkpoint / STATE_FILE).read_text()))
    mark_complete(checkpoint, read_settings(checkpoint))  # as if it had been written so
    line = fails(capsys, [*flags(model, cola, run, **SKETCH), "--resume_from_checkpoint", "last"])
    assert "Cannot resume: " in line
    assert str(checkpoint / STATE_FILE) in line


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_goes_on(
    model, cola, tmp_path, uninterrupted, monkeypatch
):
    argv = flags(model, cola, tmp_path / "run", **SKETCH)
    said = []

    def second():
        with open(tmp_path / "said", "w") as file, contextlib.redirect_stderr(file):
            return main([*argv, "--overwrite_output_dir"])

    class Meanwhile(StepTimer):
        def on_step_begin(self, *args, **kwargs):
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


def test_a_killed_run_gives_its_folder_back(tmp_path):
    def run():
        with claimed(tmp_path):
            kill()
        return 0

    assert in_a_child(run) == -signal.SIGKILL
    with claimed(tmp_path):
        pass
