"""What cannot be resumed is refused: other settings, damaged checkpoints, finished runs."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from glue_helpers import SignalTimer, fails, flags, results_of, write_cola

from glue_finetune import training
from glue_finetune.__main__ import main
from glue_finetune.checkpoints import SETTINGS_FILE

STEPS = 6  # per epoch: 48 rows in batches of 8
EPOCHS = 3
SKETCH = {"kind": "gaussian", "ratio": 0.2, "num_train_epochs": EPOCHS, "seed": 7}


@pytest.fixture(scope="module")
def cola(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cola(tmp_path_factory.mktemp("cola"), train=8 * STEPS)


@pytest.fixture(scope="module")
def interrupted(model: Path, cola: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("half") / "run"
    bomb = type("Bomb", (SignalTimer,), {"step": 2, "evaluation": None, "signum": signal.SIGINT})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "StepTimer", bomb)
        assert main(flags(model, cola, output, **SKETCH)) == 130
    return output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda argv: [*argv, "--resume_from_checkpoint", "last", "--ratio", "0.5"], "sketch was {.*'ratio': 0.2"),
        (
            lambda argv: [*argv, "--resume_from_checkpoint", "last", "--learning_rate", "1"],
            "learning_rate was 0.001, now 1",
        ),
        (
            lambda argv: [*argv, "--resume_from_checkpoint", "/nowhere"],
            "must be a checkpoint of this script; /nowhere has no",
        ),
        (lambda argv: argv, "must be empty, got .* --resume_from_checkpoint last, or .* --overwrite_output_dir"),
    ],
)
def test_what_cannot_be_resumed_is_refused_and_left_as_it_is(
    model: Path,
    cola: Path,
    interrupted: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[list[str]], list[str]],
    message: str,
) -> None:
    before = sorted(path.relative_to(interrupted) for path in interrupted.rglob("*"))
    import re

    assert re.search(message, fails(capsys, change(flags(model, cola, interrupted, **SKETCH))))
    assert sorted(path.relative_to(interrupted) for path in interrupted.rglob("*")) == before


@pytest.mark.parametrize("damage", ["", "[]", '{"seed": '])
def test_a_checkpoint_with_damaged_settings(
    model: Path, cola: Path, interrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    (checkpoint,) = interrupted.glob("checkpoint-*")
    copy = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    (copy / SETTINGS_FILE).write_text(damage)
    argv = [*flags(model, cola, tmp_path / "run", **SKETCH), "--resume_from_checkpoint", str(copy)]
    assert "is damaged" in fails(capsys, argv)
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_not_resumed_but_can_be_overwritten(
    model: Path, cola: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
