"""A model that is trained from scratch: what the curves of two other families have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
TITLES = {"language": "LLaMA on glosses", "images": "ViT on digits"}  # as tables and pictures show studies
BATCHES = {"language": 8, "images": 64}
LONG = "cola-long"  # the task of ten epochs


@dataclass(frozen=True)
class Study:
    """A data set and a model.

    Attributes:
        title: As pictures show it.
        train: Arguments of the model, one row per example.
        dev: The same, held out.
        model: Makes the model of a seed.
        score: Of the logits and the labels of held-out rows, a mean over them: what is reported, besides the loss.
        metric: Its name.
        batch: Rows per step.
        steps: Of a run.
        every: Steps between evaluations.
        learning_rate: At its highest.
        methods: What is compared.
    """

    title: str
    train: Batch
    dev: Batch
    model: Callable[[int], nn.Module]
    score: Callable[[Tensor, Tensor], float]
    metric: str
    batch: int
    steps: int
    every: int
    learning_rate: float
    methods: tuple[str, ...]

    @property
    def rows(self) -> int:
        """Rows of the training set."""
        return len(self.train["labels"])

    def batches(self, seed: int, size: int) -> Iterator[Batch]:
        """Draw batches for ever; every row comes once before one comes twice.

        Args:
            seed: Of the order.
            size: Rows per batch.

        Yields:
            Arguments of the model.
        """
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(self.rows, generator=generator)
            for begin in range(0, self.rows - size + 1, size):
                yield {name: rows[order[begin : begin + size]] for name, rows in self.train.items()}

    def evaluate(self, model: Any) -> tuple[float, float]:
        """Return the loss and the score on the held-out rows.

        Args:
            model: The model; its mode stays.

        Returns:
            Both.
        """
        was_training = model.training
        model.eval()
        loss, score, count = 0.0, 0.0, len(self.dev["labels"])
        with torch.no_grad():
            for begin in range(0, count, self.batch):
                part = {name: rows[begin : begin + self.batch] for name, rows in self.dev.items()}
                output, weight = model(**part), len(part["labels"]) / count
                loss += weight * float(output.loss)
                score += weight * self.score(output.logits, part["labels"])
        model.train(was_training)
        return loss, score
