"""A callback for transformers' Trainer that saves the sketches' state, and a model's plan, in its checkpoints.

Import it from ``rmm_linear.integrations.transformers``, whose error says what to install if transformers is missing.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rmm_linear.conversion.exact import converted_modules
from rmm_linear.conversion.state import read_sketch_state, save_sketch_state
from rmm_linear.conversion.state_files import remove_with_tensors
from rmm_linear.integrations.pretrained import STATE_FILE
from rmm_linear.integrations.saved_plans import PLAN_FILE, plan_of, restore_plan

logger = logging.getLogger(__name__)

_EARLY = re.compile(r"(?:sketch_state|rmm_plan)-(\d+)\.json")


class SketchStateCallback(TrainerCallback):
    """Saves the state of the sketches, and the plan of :func:`rmm_linear.fit`, and restores them in a resumed run.

    The state is what modules have learned in their first steps, the groups of layers that share a sketch, and the
    tensors of norm estimators and fixed directions. With it, a resumed run continues bit for bit like one that was
    never interrupted. The first process writes its state as ``sketch_state.json``, with tensors in a safetensors file
    next to it. Each rank learns from its own batches; after resuming, all ranks continue from the first one's state.
    The plan of a fitted model is written as ``rmm_plan.json``; a resumed run trains by it, whatever plan the model has
    then.

    The Trainer completes a checkpoint, and removes earlier ones, before it calls its callbacks. So that a process that
    is killed in between loses nothing, both are written before that, as ``sketch_state-STEP.json`` and
    ``rmm_plan-STEP.json`` next to the checkpoint, and removed once they are in it. For this, callbacks that request
    checkpoints themselves (``control.should_save``) must be added before this one; otherwise both are written into the
    checkpoint only.

    The Trainer does not tell its callbacks which checkpoint it resumes from. The state is read from
    ``args.resume_from_checkpoint`` if that is a folder, else from ``checkpoint-STEP`` in the output folder.

    The plan of a checkpoint in the output folder may offload to the folder that it names. That of any other checkpoint
    may not: give ``RMMCallback(fit={"folder": ...})`` again.

    Args:
        resume_from: The checkpoint to read instead, for runs that are resumed from another folder.
    """

    def __init__(self, resume_from: str | Path | None = None) -> None:
        """Store the folder; nothing is read yet."""
        self.resume_from = resume_from
        self.offload_folder: str | None = None  # of the user's own call of fit
        self._written = -1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the state if there will be a checkpoint."""
        super().on_step_end(args, state, control, **kwargs)
        if control.should_save:
            self._write_early(args, state, kwargs.get("model"))

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the state if there will be a checkpoint."""
        super().on_epoch_end(args, state, control, **kwargs)
        if control.should_save:
            self._write_early(args, state, kwargs.get("model"))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the state if there will or may be a checkpoint: whether the score is the best is not known yet."""
        super().on_evaluate(args, state, control, **kwargs)
        if control.should_save or args.save_strategy == "best":
            self._write_early(args, state, kwargs.get("model"))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the state into the checkpoint."""
        model, folder = kwargs.get("model"), _checkpoint(args, state)
        if model is None or not state.is_world_process_zero or not folder.is_dir():
            return
        if _write(model, folder / STATE_FILE, folder / PLAN_FILE):
            for name in (STATE_FILE, PLAN_FILE):
                remove_with_tensors(_early(folder, state, name))
            _remove_orphans(folder.parent)

    def _write_early(self, args: TrainingArguments, state: TrainerState, model: torch.nn.Module | None) -> None:
        is_due = state.global_step not in (0, self._written)
        if is_due and model is not None and state.is_world_process_zero and _has_state(model):
            self._written = state.global_step
            folder = _checkpoint(args, state)
            folder.parent.mkdir(parents=True, exist_ok=True)  # the Trainer makes it for its first checkpoint
            _remove_orphans(folder.parent)
            _write(model, _early(folder, state, STATE_FILE), _early(folder, state, PLAN_FILE))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the state if the run is resumed."""
        super().on_train_begin(args, state, control, **kwargs)
        self._restore(args, state, kwargs.get("model"))

    def _restore(self, args: TrainingArguments, state: TrainerState, model: torch.nn.Module | None) -> None:
        self._written = -1
        if model is None or not state.global_step:
            return
        named = self.resume_from or args.resume_from_checkpoint
        folder = Path(named) if named and Path(named).is_dir() else _checkpoint(args, state)
        if (path := _found(folder, state, PLAN_FILE)) is not None:
            output = Path(args.output_dir or "").resolve()
            is_own = bool(args.output_dir) and output in path.resolve().parents
            restore_plan(model, path, self.offload_folder, is_own=is_own)
        if not converted_modules(model):
            return
        if (path := _found(folder, state, STATE_FILE)) is not None:
            read_sketch_state(model, path)
        else:
            logger.warning("There is no %s in %s: the sketches start without a state.", STATE_FILE, folder)


def _has_state(model: torch.nn.Module) -> bool:
    return bool(converted_modules(model)) or plan_of(model) is not None


def _write(model: torch.nn.Module, state: Path, plan: Path) -> bool:
    """Write what there is of both; say whether there is anything."""
    if converted_modules(model):
        save_sketch_state(model, state)
    if (planned := plan_of(model)) is not None:
        planned.save(plan)
    return _has_state(model)


def _found(folder: Path, state: TrainerState, name: str) -> Path | None:
    """Return the path of a file in a checkpoint, or of its early version next to it; None if there is neither."""
    return next((path for path in (folder / name, _early(folder, state, name)) if path.is_file()), None)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or "") / f"checkpoint-{state.global_step}"


def _early(checkpoint: Path, state: TrainerState, name: str) -> Path:
    """Return the path of a file until it is in the checkpoint."""
    return checkpoint.parent / f"{Path(name).stem}-{state.global_step}.json"


def _remove_orphans(folder: Path) -> None:
    """Remove states whose checkpoint was removed or never written."""
    for path in list(folder.iterdir()):
        match = _EARLY.fullmatch(path.name)
        if match and not (folder / f"checkpoint-{match[1]}").is_dir():
            remove_with_tensors(path)
