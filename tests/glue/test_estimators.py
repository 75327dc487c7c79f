"""Norm estimators in the GLUE script: their flags, the examples' numbers, and runs that are resumed to the bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from glue_helpers import fails, flags, results_of, same_weights, write_cola

from glue_finetune import training
from glue_finetune.__main__ import main
from glue_finetune.compare import parse_setting
from glue_finetune.trainer import StepTimer

STEPS = 3  # per epoch: 24 rows in batches of 8
WTA = {"kind": "wta", "ratio": 0.3, "uniform_mix": 0.2}


@pytest.fixture(scope="module")
def cola(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cola(tmp_path_factory.mktemp("cola"), train=8 * STEPS)


class _Stop(StepTimer):
    """Interrupts the run in the middle of the second epoch."""

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_step_begin(*args, **kwargs)
        if args[1].global_step == STEPS + 1:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("estimator", ["position_token", "sample_cache"])
def test_a_resumed_run_ends_with_the_same_weights(
    model: Path, cola: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimator: str
) -> None:
    options = {**WTA, "norm_estimator": estimator}
    assert main(flags(model, cola, tmp_path / "whole", **options)) == 0
    argv = flags(model, cola, tmp_path / "run", **options)
    with monkeypatch.context() as patch:
        patch.setattr(training, "StepTimer", _Stop)
        assert main(argv) == 130
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    assert len(list(checkpoint.glob("sketch_state.json.*.safetensors"))) == 1
    assert main([*argv, "--resume_from_checkpoint", "last"]) == 0
    assert same_weights(tmp_path / "run", tmp_path / "whole")
    whole, resumed = results_of(tmp_path / "whole"), results_of(tmp_path / "run")
    assert whole["sketch"]["norm_estimator"] == estimator
    assert whole["sketch"]["uniform_mix"] == 0.2
    assert whole["norm_estimator_bytes"] == resumed["norm_estimator_bytes"] > 0


def test_estimators_change_the_run_and_a_lost_state_is_noticed(
    model: Path, cola: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(model, cola, tmp_path / "none", **WTA)) == 0
    argv = flags(model, cola, tmp_path / "run", **WTA, norm_estimator="position")
    with monkeypatch.context() as patch:
        patch.setattr(training, "StepTimer", _Stop)
        assert main(argv) == 130
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    (tensors,) = checkpoint.glob("sketch_state.json.*.safetensors")
    saved = tensors.read_bytes()
    tensors.write_bytes(saved[:-4])
    assert f"{tensors.name} is damaged" in fails(capsys, [*argv, "--resume_from_checkpoint", "last"])
    tensors.write_bytes(saved)
    assert main([*argv, "--resume_from_checkpoint", "last"]) == 0
    assert not same_weights(tmp_path / "run", tmp_path / "none")


def test_a_cache_remembers_every_training_row_and_no_other(model: Path, cola: Path, tmp_path: Path) -> None:
    """Its bytes are those of 24 sequences for each layer that sees tokens; 24 rows of evaluation add nothing."""
    options = {**WTA, "norm_estimator": "sequence_cache", "num_train_epochs": 1}
    assert main(flags(model, cola, tmp_path / "run", **options)) == 0
    layers = 2 * 6  # and not the head's two, which see one row per sequence and know no sequences
    results = results_of(tmp_path / "run")
    assert results["norm_estimator_bytes"] == layers * (24 * 2 + 8)
    assert len(results["converted"]) == layers + 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "rows", "norm_estimator": "token"}, "norm_estimator is for .*wta"),
        ({"kind": "wta", "norm_estimator": "tokens"}, "norm_estimator must be one of none, position, "),
        ({"kind": "wta", "uniform_mix": 0}, r"uniform_mix must be in \(0, 1\]"),
    ],
)
def test_wrong_flags_are_refused(
    model: Path, cola: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], message: str
) -> None:
    import re

    assert re.search(message, fails(capsys, flags(model, cola, tmp_path / "run", **options)))
    assert not (tmp_path / "run").exists()


def test_an_entry_of_a_comparison_may_name_an_estimator() -> None:
    setting = parse_setting("wta+token:0.3")
    assert setting.flags == ("--kind", "wta", "--ratio", "0.3", "--norm_estimator", "token")
    assert setting.folder == "wta+token-0.3"
    assert parse_setting("wta:0.3").flags == ("--kind", "wta", "--ratio", "0.3")


@pytest.mark.parametrize("text", ["wta+:0.3", "+token:0.3", "wta+"])
def test_an_entry_with_half_an_estimator_is_refused(text: str) -> None:
    from glue_finetune.errors import UserError

    with pytest.raises(UserError, match="An entry of --compare must be"):
        parse_setting(text)
