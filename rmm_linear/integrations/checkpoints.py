"""A callback for transformers' Trainer that puts the sketches' state into its checkpoints.

Loaded by ``rmm_linear.integrations.transformers``, which says what to install.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rmm_linear.linear import SketchedLayer
from rmm_linear.state import read_sketch_state, save_sketch_state

logger = logging.getLogger(__name__)

STATE_FILE = "sketch_state.json"


class SketchStateCallback(TrainerCallback):
    """Saves what the sketches have learned with every checkpoint, and restores it when a run is resumed.

    That is the bits that ``bits="auto"`` chose, the groups of layers that share a sketch, and what norm estimators
    have learned; with it, a resumed run goes on to the bit as one that was never interrupted. Saved are
    ``sketch_state.json`` and ``sketch_state.json.safetensors``, of the first process: each rank learns from batches of
    its own, and all go on from the first one's state.

    The Trainer does not tell its callbacks where it resumes from: looked into is
    ``args.resume_from_checkpoint``, if it is a folder, else ``checkpoint-STEP`` in the output folder.

    Args:
        resume_from: The checkpoint, where a run is resumed from somewhere else.
    """

    def __init__(self, resume_from: str | Path | None = None) -> None:
        """Remember where to look."""
        self.resume_from = resume_from

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the state into the checkpoint.

        Args:
            args: The Trainer's arguments.
            state: Where training is.
            control: Unused.
            model: The model.
            **kwargs: Unused.
        """
        folder = _checkpoint(args, state)
        if model is not None and state.is_world_process_zero and folder.is_dir() and _is_sketched(model):
            save_sketch_state(model, folder / STATE_FILE)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Restore the state, if the run is resumed.

        Args:
            args: The Trainer's arguments.
            state: Where training is.
            control: Unused.
            model: The model.
            **kwargs: Unused.
        """
        super().on_train_begin(args, state, control, model=model, **kwargs)
        if model is None or not state.global_step or not _is_sketched(model):
            return
        named = self.resume_from or args.resume_from_checkpoint
        folder = Path(named) if named and Path(named).is_dir() else _checkpoint(args, state)
        if (folder / STATE_FILE).is_file():
            read_sketch_state(model, folder / STATE_FILE)
        else:
            logger.warning("There is no %s in %s: the sketches begin anew what they learn.", STATE_FILE, folder)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or "") / f"checkpoint-{state.global_step}"


def _is_sketched(model: torch.nn.Module) -> bool:
    return any(isinstance(module, SketchedLayer) for module in model.modules())
