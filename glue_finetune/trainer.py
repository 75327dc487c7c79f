"""transformers' Trainer, measuring what a training step keeps and how long it takes."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from rmm_linear.memory import track_saved

BYTES_KEPT = "bytes_kept"
SETTINGS_FILE = "glue_settings.json"


class GlueTrainer(Trainer):
    """The Trainer; on the first step of a run it also counts the bytes kept for the backward pass.

    The count is put in the state's log_history, which checkpoints carry, so a resumed run still has it.
    """

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Compute the loss as the Trainer does.

        Args:
            model: The model.
            inputs: One batch.
            return_outputs: Return the model's outputs too.
            num_items_in_batch: As in Trainer.

        Returns:
            The loss, or the loss and the outputs.
        """
        options = {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
        if not model.training or any(BYTES_KEPT in entry for entry in self.state.log_history):
            return super().compute_loss(model, inputs, **options)
        shape = list(inputs["input_ids"].shape)
        with track_saved(model) as kept:
            result = super().compute_loss(model, inputs, **options)
        step = self.state.global_step + 1
        entry: dict[str, Any] = {BYTES_KEPT: kept.total, "batch_shape": shape, "step": step}
        self.state.log_history.append(entry)
        return result


class StepTimer(TrainerCallback):
    """Times every optimizer step of this process, loading of data excluded.

    Attributes:
        seconds: Duration of each step; the first one, which also counts bytes and warms caches, is left out.
    """

    def __init__(self) -> None:
        """Start with no step."""
        self.seconds: list[float] = []
        self._began: float | None = None
        self._first = True

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock.

        Args:
            *args: Unused.
            **kwargs: Unused.
        """
        self._began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop the clock.

        Args:
            *args: Unused.
            **kwargs: Unused.
        """
        if self._began is not None and not self._first:
            self.seconds.append(time.perf_counter() - self._began)
        self._first = False

    def summary(self) -> dict[str, float | int | None]:
        """Return the timing for results.json.

        Returns:
            Median seconds per step (None without a timed step) and the number of steps timed.
        """
        return {"median": statistics.median(self.seconds) if self.seconds else None, "steps": len(self.seconds)}


class SettingsCallback(TrainerCallback):
    """Puts the run's settings beside every checkpoint, so that another run does not resume from it by mistake."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Remember the settings.

        Args:
            settings: What determines the outcome of the run.
        """
        self.settings = settings

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the settings into the checkpoint.

        Args:
            args: The Trainer's arguments.
            state: Where training is.
            control: Unused.
            **kwargs: Unused.
        """
        folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            (folder / SETTINGS_FILE).write_text(json.dumps(self.settings, indent=2, sort_keys=True), encoding="utf-8")


class EpochLines(TrainerCallback):
    """Prints one short line for each evaluation, whole dictionaries for nothing."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Print the scores that the Trainer has just logged.

        Args:
            args: Unused.
            state: Where training is.
            control: Unused.
            logs: The entry.
            **kwargs: Unused.
        """
        scores = evaluation_scores(logs or {})
        if scores and state.is_world_process_zero:
            numbers = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
            ProgressCallbackWithoutLogs.write(f"epoch {state.epoch or 0:.2f}  {numbers}")


class ProgressCallbackWithoutLogs(ProgressCallback):
    """The progress bars without the dictionaries that the Trainer logs."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """Print nothing.

        Args:
            *args: Unused.
            **kwargs: Unused.
        """

    @staticmethod
    def write(line: str) -> None:
        """Print a line above the progress bars.

        Args:
            line: The line.
        """
        from tqdm.auto import tqdm

        tqdm.write(line)


def evaluation_scores(entry: dict[str, Any]) -> dict[str, float]:
    """Pick the scores out of one entry of the Trainer's log.

    Args:
        entry: An entry, as of ``state.log_history``.

    Returns:
        Name of each metric, "loss" among them, to its value; empty if the entry is no evaluation.
    """
    speed = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    return {
        name.removeprefix("eval_"): value
        for name, value in entry.items()
        if name.startswith("eval_") and not name.endswith(speed)
    }


def add_progress(trainer: Trainer) -> None:
    """Replace the Trainer's own printing by progress bars and one line per evaluation.

    Args:
        trainer: The Trainer.
    """
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    if not trainer.args.disable_tqdm:
        trainer.add_callback(ProgressCallbackWithoutLogs)
    trainer.add_callback(EpochLines)
