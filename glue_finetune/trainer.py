"""transformers' Trainer, measuring what a training step keeps and how long it takes."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from glue_finetune.complete import complete_checkpoints, mark_complete, remove_checkpoint
from glue_finetune.errors import UserError
from glue_finetune.files import saving
from rmm_linear import save_sketch_state
from rmm_linear.memory import track_saved

BYTES_KEPT = "bytes_kept"
SKETCH_FILE = "sketch_state.json"
MEASURED_STEP = 10  # not the first, on which bits="auto" has not chosen yet; a shorter run's last one


class GlueTrainer(Trainer):
    """The Trainer; on one step of a run it also counts the bytes kept for the backward pass.

    The count is put in the state's log_history, which checkpoints carry, so a resumed run still has it.
    """

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        """Create the schedule as the Trainer does, with a warm-up that leaves at least one step after it.

        Args:
            num_training_steps: Steps of the whole run.
            *args: As in Trainer.
            **kwargs: As in Trainer.

        Returns:
            The scheduler.
        """
        # Polynomial decay divides by the number of steps after the warm-up.
        given = self.args.warmup_steps
        if self.args.get_warmup_steps(num_training_steps) >= num_training_steps:
            self.args.warmup_steps = max(num_training_steps - 1, 0)
        try:
            return super().create_scheduler(num_training_steps, *args, **kwargs)
        finally:
            self.args.warmup_steps = given  # results.json has what was asked for, or a run is not known again

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
        step = self.state.global_step + 1
        is_early = step < min(MEASURED_STEP, self.state.max_steps)
        if not model.training or is_early or any(BYTES_KEPT in entry for entry in self.state.log_history):
            return super().compute_loss(model, inputs, **options)
        shape = list(inputs["input_ids"].shape)
        with track_saved(model) as kept:
            result = super().compute_loss(model, inputs, **options)
        entry: dict[str, Any] = {BYTES_KEPT: kept.total, "batch_shape": shape, "step": step}
        self.state.log_history.append(entry)
        return result

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir or "") / f"checkpoint-{self.state.global_step}"
        limit = self.args.save_total_limit
        self.args.save_total_limit = None  # earlier checkpoints stay until this one is complete, see CheckpointFiles
        try:
            with saving(folder):
                super()._save_checkpoint(model, trial)
        except UserError:
            shutil.rmtree(folder, ignore_errors=True)  # room, and nobody takes it for a checkpoint
            raise
        finally:
            self.args.save_total_limit = limit


class StepTimer(TrainerCallback):
    """Times every optimizer step of this process, loading of data excluded.

    Attributes:
        seconds: Duration of each step; the first one, which warms caches, is left out.
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


class CheckpointFiles(TrainerCallback):
    """Adds to every checkpoint what the Trainer leaves out: the state of the sketches, and the run's settings.

    The settings come last, with a digest of every file, so a checkpoint that has them is complete, and keep another run
    from going on from it. Only then are earlier checkpoints removed, so that there is always a complete one.
    """

    def __init__(self, settings: dict[str, Any], sketched: bool) -> None:
        """Remember what to save.

        Args:
            settings: What determines the outcome of the run.
            sketched: Whether the model has sketched layers.
        """
        self.settings, self.sketched = settings, sketched

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the files into the checkpoint.

        Args:
            args: The Trainer's arguments.
            state: Where training is.
            control: Unused.
            model: The model.
            **kwargs: Unused.
        """
        if args.world_size > 1:
            torch.distributed.barrier()  # every process has written its part
        folder = Path(args.output_dir or "") / f"checkpoint-{state.global_step}"
        if not state.is_world_process_zero or not folder.is_dir():
            return
        with saving(folder):
            if self.sketched and model is not None:
                save_sketch_state(model, folder / SKETCH_FILE)
            mark_complete(folder, self.settings)
        best = Path(state.best_model_checkpoint or "")
        earlier = [path for path in complete_checkpoints(folder.parent) if path != best]
        for path in earlier[: -args.save_total_limit] if args.save_total_limit else []:
            with contextlib.suppress(OSError):  # what is left is removed when a run is resumed
                remove_checkpoint(path)


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
