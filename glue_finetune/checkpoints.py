"""The rules for output_dir: when it may be used, and which checkpoint a run goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glue_finetune.arguments import GlueTrainingArguments
from glue_finetune.complete import CHECKPOINT, SETTINGS_FILE, complete_checkpoints, read_settings, remove_checkpoint
from glue_finetune.errors import UserError
from glue_finetune.files import has_files, make_folder
from glue_finetune.results import RESULTS_FILE, VARIANCE_FILE, differences


def choose_checkpoint(training: GlueTrainingArguments, settings: dict[str, Any]) -> Path | None:
    """Apply the rules for output_dir, reading only.

    Args:
        training: The Trainer's arguments.
        settings: What determines the outcome of the run.

    Returns:
        The checkpoint to go on from; None to start anew.

    Raises:
        UserError: If output_dir is not empty though the run neither resumes nor overwrites, or if it should resume
            and there is nothing to resume from, or that belongs to a run with other settings.
    """
    folder, wanted = Path(training.output_dir or ""), training.resume_from_checkpoint
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir must be a folder, got the file {folder}. Choose another one.")
    if not wanted or str(wanted).lower() == "false":
        if not training.overwrite_output_dir and has_files(folder):
            raise UserError(
                f"output_dir must be empty, got {folder} with files in it. Choose another one, go on with "
                "--resume_from_checkpoint last, or start anew with --overwrite_output_dir."
            )
        return None
    if str(wanted).lower() in ("true", "last"):
        checkpoints = complete_checkpoints(folder)
        if not checkpoints:
            raise UserError(f"resume_from_checkpoint needs a checkpoint, {folder} has none. Leave the flag out.")
        checkpoint = checkpoints[-1]
    else:
        checkpoint = Path(str(wanted)).expanduser()
        if not (checkpoint / SETTINGS_FILE).is_file():
            raise UserError(
                f"resume_from_checkpoint must be a checkpoint of this script; {checkpoint} has no {SETTINGS_FILE}."
            )
    if checkpoint.parent.resolve() == folder.resolve() and (folder / RESULTS_FILE).exists():
        raise UserError(f"The run in {folder} is finished, see {RESULTS_FILE}. Start anew with --overwrite_output_dir.")
    if changes := differences(read_settings(checkpoint), settings):
        raise UserError(f"A resumed run must have the settings it began with; {changes}. Choose another output_dir.")
    return checkpoint


def prepare_folder(training: GlueTrainingArguments, resuming: bool) -> Path:
    """Make output_dir, and remove what must not stay; of several processes, the first one removes.

    Args:
        training: The Trainer's arguments.
        resuming: Remove only the checkpoints that a killed process left incomplete. Otherwise, when overwriting, remove
            an earlier run's checkpoints and results and nothing else.

    Returns:
        The folder.

    Raises:
        UserError: If it cannot be written.
    """
    folder = Path(training.output_dir or "")
    make_folder(folder)
    try:
        if training.process_index == 0 and (resuming or training.overwrite_output_dir):
            kept = complete_checkpoints(folder) if resuming else []
            if not resuming:
                for name in (RESULTS_FILE, VARIANCE_FILE):
                    (folder / name).unlink(missing_ok=True)
            for path in folder.iterdir():
                if path.is_dir() and CHECKPOINT.fullmatch(path.name) and path not in kept:
                    remove_checkpoint(path)
    except OSError as error:
        raise UserError(f"Cannot write output_dir {folder}: {error.strerror}. Choose another one.") from error
    return folder
