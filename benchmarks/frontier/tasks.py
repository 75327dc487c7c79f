"""The GLUE tasks that methods are compared on, and the model that is fine-tuned."""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from transformers import DataCollatorWithPadding, PreTrainedModel, set_seed

from glue_finetune.minilm import save_minilm
from glue_finetune.modeling import limit_length, load_config, load_model, load_tokenizer, take_columns, tokenize
from glue_finetune.tasks import Task, get_task, load_task
from rmm_linear.estimators import IndexedDataset, with_sample_index

BATCH, _TOKENS, _MAX_LENGTH, _TINY_ROWS = 32, 2048, 128, 96


@dataclass(frozen=True)
class Training:
    """How much of a task is trained on.

    Attributes:
        task: Name of the GLUE task.
        epochs: Times that the training set is seen.
        rows: Only the first rows of the training set.
        batch: Rows per step.
        methods: What is trained; None is everything.
        seeds: What is trained of those that are asked for; None is all.
        slower: By what learning rates are divided.
        is_watched: Whether the loss on the training set is evaluated after every epoch, as that on the dev set.
    """

    task: str
    epochs: int
    rows: int | None = None
    batch: int = BATCH
    methods: tuple[str, ...] | None = None
    seeds: tuple[int, ...] | None = None
    slower: float = 1
    is_watched: bool = False


TRAININGS: dict[str, Training] = {
    "sst2": Training("sst2", 2, 6000),
    "cola": Training("cola", 2),
    "stsb": Training("stsb", 2),
    "rte": Training("rte", 2),
    "sst2-full": Training("sst2", 1, methods=("exact", "tenth"), seeds=(0,)),
    "cola-long": Training("cola", 10, batch=16, methods=("exact", "tenth"), is_watched=True),
    # At the published learning rate, which is meant for a model of five times the parameters.
    "cola-slow": Training("cola", 10, batch=16, methods=("exact", "tenth"), slower=10, is_watched=True),
    # AdamW divides by the size of gradients, noise among it. Where gradients are mostly noise, a fifth more of it makes
    # steps shorter by √1.2, about 1.1: is that what the default loses?
    "cola-raised": Training("cola", 10, batch=16, methods=("tenth",), slower=10 / 1.1, is_watched=True),
}


@dataclass(frozen=True)
class Prepared:
    """A task, cut into tokens.

    Attributes:
        name: Of :data:`TRAININGS`.
        training: What is trained on.
        task: The GLUE task.
        rows: Training set.
        dev: Dev set.
        tokenizer: Of the model.
        config: Of the model.
        folder: Of the model.
    """

    name: str
    training: Training
    task: Task
    rows: Any
    dev: Any
    tokenizer: Any
    config: Any
    folder: str

    def model(self, seed: int) -> PreTrainedModel:
        """Load the model; its classifier is drawn anew.

        Args:
            seed: Of the classifier.

        Returns:
            The model in training mode.
        """
        set_seed(seed)
        return load_model(self.folder, self.config).train()

    def collator(self, *, indexed: bool) -> Any:
        """Return what makes a batch of rows.

        Args:
            indexed: Whether batches have the numbers of their examples.

        Returns:
            The collator.
        """
        collator: Any = DataCollatorWithPadding(self.tokenizer)
        return with_sample_index(collator) if indexed else collator

    def data(self, model: torch.nn.Module, *, indexed: bool) -> tuple[Any, Any]:
        """Return the training set and the dev set, with the columns that a model takes.

        Args:
            model: The model, not yet wrapped.
            indexed: Whether rows of the training set have their number.

        Returns:
            Both.
        """
        rows, dev = (take_columns(part, model) for part in (self.rows, self.dev))
        return IndexedDataset(rows) if indexed else rows, dev

    def batch(self, model: torch.nn.Module, *, indexed: bool = False, count: int | None = None) -> dict[str, Any]:
        """Return a batch whose costs are measured, the same for all methods: rows of the median length and no other.

        Some methods keep padding and others do not, and there is none. It is larger than those that are trained on by
        default, so that what is saved outweighs the gradient of the word embeddings, which all methods have.

        Args:
            model: The model, not yet wrapped.
            indexed: Whether it has the numbers of its examples.
            count: Rows, or as many as there are; None takes as many as have about 2,048 tokens.

        Returns:
            Its arguments.
        """
        rows, _ = self.data(model, indexed=indexed)
        lengths = [len(ids) for ids in self.rows["input_ids"]]
        median = statistics.median_low(lengths)
        alike = [place for place, length in enumerate(lengths) if length == median]
        count = count or max(_TOKENS // median, BATCH)
        return dict(self.collator(indexed=indexed)([rows[place] for place in alike[:count]]))


@functools.lru_cache(maxsize=2)
def prepare(name: str, data_dir: str, folder: str, *, tiny: bool = False) -> Prepared:
    """Read a task and cut it into tokens.

    Args:
        name: Of :data:`TRAININGS`.
        data_dir: Folder in the official GLUE layout.
        folder: Of the model; MiniLM is written into it if there is none.
        tiny: Whether to take few rows.

    Returns:
        The task.

    Raises:
        glue_finetune.errors.UserError: If something cannot be read.
    """
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    training = TRAININGS[name]
    task = get_task(training.task)
    if not (Path(folder) / "config.json").is_file():
        save_minilm(Path(folder))
    count = _TINY_ROWS if tiny else training.rows
    data = load_task(task, data_dir, count, _TINY_ROWS if tiny else None)
    tokenizer, config = load_tokenizer(folder), load_config(task, folder)
    length = limit_length(tokenizer, _MAX_LENGTH)
    rows, dev = (tokenize(part, tokenizer, length) for part in (data.train, data.dev[""]))
    return Prepared(name, training, task, rows, dev, tokenizer, config, folder)
