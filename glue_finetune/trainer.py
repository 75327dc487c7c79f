"""transformers' Trainer, which measures a training step's activation memory and time, and its callbacks.

SIGINT and SIGTERM become a checkpoint from which a run goes on as if nothing had happened. The first signal lets the
current step finish, saves, and ends training. Where the step is the last of its epoch, the epoch's evaluation and
saving still take place, so that the resumed run finds the random generators where an uninterrupted one has them. The
second signal ends the process at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import shutil
import signal
import statistics
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from typing_extensions import override

from glue_finetune.checkpoints import complete_checkpoints, mark_complete, remove_checkpoint, saving
from glue_finetune.errors import Interrupted, UserError, one_line
from rmm_linear import ConversionReport
from rmm_linear.conversion.explained import explained
from rmm_linear.integrations.transformers import SketchStateCallback
from rmm_linear.memory import track_saved

BYTES_KEPT, BYTES_OF_LAYERS, BY_OPERATION = "bytes_kept", "bytes_kept_by_layers", "bytes_by_operation"
LINEAR_EXACT = "linear_exact"
MEASURED_STEP = 10  # not the first, which has no optimizer states yet; a shorter run's last one


class GlueTrainer(Trainer):
    """The Trainer; on one step of a run it also counts the bytes saved for the backward pass.

    The count is put in the state's log_history, which checkpoints carry, so a resumed run still has it.
    """

    layers: Collection[str] = ()  # names of the linear layers whose part of the bytes is counted by itself
    report: ConversionReport | None = None  # None for the exact model

    @override
    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        # Polynomial decay divides by the number of steps after the warm-up: at least one is left.
        given = self.args.warmup_steps
        if self.args.get_warmup_steps(num_training_steps) >= num_training_steps:
            self.args.warmup_steps = max(num_training_steps - 1, 0)
        try:
            return super().create_scheduler(num_training_steps, *args, **kwargs)
        finally:
            self.args.warmup_steps = given  # results.json has what was asked for, or a run is not known again

    @override
    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        step = self.state.global_step + 1
        is_early = step < min(MEASURED_STEP, self.state.max_steps)
        if (
            not torch.is_grad_enabled()
            or not model.training
            or is_early
            or any(BYTES_KEPT in entry for entry in self.state.log_history)
        ):
            return super().compute_loss(model, inputs, *args, **kwargs)
        shape = list(inputs["input_ids"].shape)
        unwrapped: Any = self.model  # `model` may be wrapped, with prefixes before the names
        again = dict(inputs)
        with track_saved(unwrapped) as kept:
            result = super().compute_loss(model, inputs, *args, **kwargs)
        layers = sum(bytes for name, bytes in kept.by_module.items() if name in self.layers)
        entry: Any = {BYTES_KEPT: kept.total, BYTES_OF_LAYERS: layers, "batch_shape": shape, "step": step}
        entry |= self._explain(unwrapped, again)
        self.state.log_history.append(entry)
        return result

    def _explain(self, model: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        """Print what the whole model saves, exactly and converted; return it, and the linear layers that stay exact."""
        if self.report is None:
            return {}
        report = self.report.in_training(model)
        try:  # after the step's own forward pass, which is the one that is probed
            found = explained(model, report, lambda: super(GlueTrainer, self).compute_loss(model, dict(inputs)))
        except torch.OutOfMemoryError:
            tqdm.write("Activation memory of the exact model is unknown: it runs out of memory on this batch.")
            return {}
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # the exact model's is none of this run's
        if self.is_world_process_zero():
            tqdm.write(f"{found.line()}{found.note()}")
        return {
            BY_OPERATION: {name: dataclasses.asdict(memory) for name, memory in found.operations.items()},
            LINEAR_EXACT: dataclasses.replace(report, memory=found).linear_exact,
        }

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir or "") / f"checkpoint-{self.state.global_step}"
        limit = self.args.save_total_limit
        self.args.save_total_limit = None  # earlier checkpoints stay until this one is complete, see CheckpointFiles
        try:
            with saving(folder):
                super()._save_checkpoint(model, trial)
        except UserError:
            shutil.rmtree(folder, ignore_errors=True)  # makes room, and is not taken for a checkpoint
            raise
        finally:
            self.args.save_total_limit = limit


class StepTimer(TrainerCallback):
    """Times every optimizer step of this process, loading of data excluded."""

    def __init__(self) -> None:
        """Start with no step."""
        self._began, self._seconds = 0.0, []

    @override
    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    @override
    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._seconds.append(time.perf_counter() - self._began)

    def summary(self) -> dict[str, float | int | None]:
        """Return the median of seconds per step, None without one, and the number of steps; the first warms caches."""
        timed = self._seconds[1:]
        return {"median": statistics.median(timed) if timed else None, "steps": len(timed)}


class CheckpointFiles(TrainerCallback):
    """Adds to every checkpoint what the Trainer leaves out: the state of the sketches, and the run's settings.

    The settings come last, with a digest of every file, so a checkpoint that has them is complete, and keep another run
    from going on from it. Only then are earlier checkpoints removed, so that there is always a complete one. This is
    why SketchStateCallback hears of no other event: it need not write the state early.

    Args:
        settings: What determines the outcome of the run.
        resume_from: The checkpoint that the run goes on from.
    """

    def __init__(self, settings: dict[str, Any], resume_from: Path | None = None) -> None:
        """Remember what to save."""
        self.settings, self.sketches = settings, SketchStateCallback(resume_from)

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        try:
            self.sketches.on_train_begin(args, state, control, **kwargs)
        except (OSError, ValueError) as error:
            raise UserError(f"Cannot resume: {one_line(error)}") from error

    @override
    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.world_size > 1:
            torch.distributed.barrier()  # every process has written its part
        folder = Path(args.output_dir or "") / f"checkpoint-{state.global_step}"
        if not state.is_world_process_zero or not folder.is_dir():
            return
        with saving(folder):
            self.sketches.on_save(args, state, control, **kwargs)
            mark_complete(folder, self.settings)
        best = Path(state.best_model_checkpoint or "")
        earlier = [path for path in complete_checkpoints(folder.parent) if path != best]
        for path in earlier[: -args.save_total_limit] if args.save_total_limit else []:
            with contextlib.suppress(OSError):  # what is left is removed when a run is resumed
                remove_checkpoint(path)


class InterruptCallback(TrainerCallback):
    """Saves a checkpoint and stops the Trainer after a signal."""

    signum: int | None = None  # of the signal that came
    started: bool = False  # training has begun, so that there is something to save

    @contextmanager
    def installed(self) -> Iterator[InterruptCallback]:
        """Handle the signals inside the block; outside the main thread, where Python has no signals, do nothing.

        Yields:
            The callback itself.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {signum: signal.signal(signum, self._handle) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            os._exit(128 + signum)
        self.signum = signum
        if not self.started:
            raise Interrupted(signum)
        # os.write, as the signal may have come in the middle of a print.
        name = signal.Signals(signum).name
        text = f"\n{name}: finishing the step, then saving a checkpoint. Once more stops at once.\n"
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, text.encode())

    @override
    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = True

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.signum is not None and not _at_end(state):
            control.should_save = control.should_training_stop = True

    @override
    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.signum is not None:
            control.should_save = control.should_training_stop = True

    @override
    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.signum is None:
            return
        control.should_training_stop = True
        control.should_save = _at_end(state)
        if not _at_end(state):  # a loop left half way is saved already and not evaluated
            control.should_evaluate = control.should_log = False


def _at_end(state: TrainerState) -> bool:
    """Whether the step just made is the last of its epoch or of the run."""
    return state.global_step >= state.max_steps or (state.epoch is not None and float(state.epoch).is_integer())


class EpochLines(TrainerCallback):
    """Prints one short line for each evaluation."""

    @override
    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        scores = evaluation_scores(logs or {})
        if scores and state.is_world_process_zero:
            numbers = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
            kept = next((entry[BYTES_KEPT] for entry in state.log_history if BYTES_KEPT in entry), None)
            memory = "" if kept is None else f"  saved for backward {kept / 2**20:.1f} MiB"
            if torch.cuda.is_available():
                memory += f"  peak {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB"
            tqdm.write(f"epoch {state.epoch or 0:.2f}  {numbers}{memory}")  # above the progress bars


class _EpochLinesAndBars(EpochLines, ProgressCallback):
    """The Trainer's progress bars with these lines in place of its dictionaries."""


def peak_memory() -> dict[str, Any]:
    """Return the peak of this process: what torch allocated where there is a GPU, else its resident set."""
    if torch.cuda.is_available():
        return {"peak_bytes": torch.cuda.max_memory_allocated(), "peak_of": "CUDA"}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "peak_of": "process RSS"}


def evaluation_scores(entry: dict[str, Any]) -> dict[str, float]:
    """Pick the scores, "loss" among them, out of one entry of the Trainer's log; empty if it is no evaluation."""
    speed = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    return {
        name.removeprefix("eval_"): value
        for name, value in entry.items()
        if name.startswith("eval_") and not name.endswith(speed)
    }


def add_progress(trainer: Trainer) -> None:
    """Replace the Trainer's own printing by progress bars and one line per evaluation."""
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(EpochLines() if trainer.args.disable_tqdm else _EpochLinesAndBars())
