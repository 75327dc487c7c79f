"""One run: a method, a task, a seed."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from benchmarks.frontier.methods import METHODS
from benchmarks.frontier.rows import Epoch
from benchmarks.frontier.tasks import prepare
from glue_finetune.modeling import take_columns
from glue_finetune.scoring import make_scorer
from glue_finetune.tasks import PAPER
from rmm_linear.sketches.seeds import mix

DROPOUT = "by step"


class SameOrder(Trainer):
    """Takes the order of rows from the seed alone: methods draw from PyTorch's own generator, and not alike."""

    def _get_train_sampler(self, train_dataset: Any = None) -> LengthGroupedSampler:
        rows: Any = self.train_dataset if train_dataset is None else train_dataset
        lengths = [len(rows[place]["input_ids"]) for place in range(len(rows))]
        generator = torch.Generator().manual_seed(self.args.seed)
        return LengthGroupedSampler(self.args.train_batch_size, lengths=lengths, generator=generator)


class SameDropout(TrainerCallback):
    """Begins the random numbers of every step with the seed and the step alone.

    Methods that draw a number per step would shift the masks of dropout of all later steps: differences to the exact
    run of the same seed would be those of other masks.
    """

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Seed the step."""
        torch.manual_seed(mix(args.seed, state.global_step))


def train(
    name: str, method: str, seed: int, data_dir: str, model_dir: str, plan: Path | None, tiny: bool
) -> list[Epoch]:
    """Fine-tune the model on a task with one method.

    AdamW, decay and warm-up are those of Bershatsky et al. 2022; batch and learning rate are larger, since the model is
    smaller and sees less. Rows of like length are trained on together: padding would be half of the work.

    Args:
        name: Of :data:`benchmarks.frontier.tasks.TRAININGS`.
        method: Of :data:`benchmarks.frontier.methods.METHODS`.
        seed: Of all that is random.
        data_dir: Folder in the official GLUE layout.
        model_dir: Folder of the model.
        plan: Saved plan of methods with a budget.
        tiny: Whether to take few rows.

    Returns:
        A row per epoch, without where it comes from.
    """
    how = METHODS[method]
    ready = prepare(name, data_dir, model_dir, tiny=tiny)
    model = ready.model(seed)
    rows, dev = ready.data(model, indexed=how.is_indexed)
    evaluated: dict[str, Any] = {"dev": dev} | (
        {"train": take_columns(ready.rows, model)} if ready.training.is_watched else {}
    )
    prepared = how.prepare(model, plan)
    rate = how.learning_rate / ready.training.slower
    epochs = ready.training.epochs
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            **PAPER, "num_train_epochs": epochs, "learning_rate": rate,
            "per_device_train_batch_size": ready.training.batch, "per_device_eval_batch_size": 64, "seed": seed,
            "eval_strategy": "epoch", "logging_strategy": "epoch", "save_strategy": "no", "report_to": "none",
            "disable_tqdm": True, "use_cpu": True, "remove_unused_columns": False, "label_names": ["labels"],
            "dataloader_pin_memory": False, "train_sampling_strategy": "group_by_length",
        }  # fmt: skip
        trainer = SameOrder(
            model=prepared,  # pyright: ignore[reportArgumentType]
            args=TrainingArguments(folder, **settings),
            train_dataset=rows,
            eval_dataset=evaluated,
            data_collator=ready.collator(indexed=how.is_indexed),
            compute_metrics=make_scorer(ready.task),
            callbacks=[SameDropout()],
        )
        trainer.remove_callback(PrinterCallback)
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    scores = [entry for entry in trainer.state.log_history if "eval_dev_loss" in entry]
    fitted = [entry["eval_train_loss"] for entry in trainer.state.log_history if "eval_train_loss" in entry]
    metric = ready.task.main_metric
    return [
        Epoch(
            task=name,
            method=method,
            seed=seed,
            epoch=number,
            epochs=epochs,
            metric=metric,
            score=entry[f"eval_dev_{metric}"],
            dev_loss=entry["eval_dev_loss"],
            train_loss=loss,
            steps=int(entry["step"]),
            seconds=seconds,
            batch=ready.training.batch,
            learning_rate=rate,
            rows=len(ready.rows),
            settings=how.settings(plan),
            dropout=DROPOUT,
            fitted_loss=of_rows,
        )
        for number, (loss, entry, of_rows) in enumerate(
            zip(losses, scores, fitted or [None] * epochs, strict=True), start=1
        )
    ]
