"""Score predictions with the official GLUE metrics, through `evaluate`."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import evaluate
import numpy as np
from transformers import EvalPrediction

from glue_finetune.errors import one_line
from glue_finetune.tasks import Task

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).with_name("glue_scores.py")


def load_metric(task: Task, source: str = "shipped") -> evaluate.EvaluationModule:
    """Load the metric of a task, which keeps its rows in memory and writes no file.

    The shipped module is the default: it gives the hub's numbers, never waits for a network, and runs no code that
    was downloaded.

    Args:
        task: The task.
        source: "shipped", or "hub" for the hub's `glue` module; if that cannot be had, the shipped one with a warning.

    Returns:
        The metric.
    """
    if source == "hub":
        try:
            return evaluate.load("glue", task.name, keep_in_memory=True)
        except (OSError, RuntimeError, ValueError) as error:
            logger.warning("The hub's metric is out of reach (%s): using the shipped one.", one_line(error))
    # A path with the system's own separators, otherwise evaluate takes it for a name on the hub.
    return evaluate.load(os.fspath(SHIPPED), task.name, keep_in_memory=True)


def make_scorer(task: Task, source: str = "shipped") -> Callable[[EvalPrediction], dict[str, float]]:
    """Return the function from a model's outputs, shape (rows, classes) or (rows, 1), to the task's metrics."""
    metric = load_metric(task, source)

    def score(output: EvalPrediction) -> dict[str, float]:
        logits = output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
        predictions = np.squeeze(logits, -1) if task.is_regression else np.argmax(logits, axis=-1)
        with warnings.catch_warnings():
            # A model that answers the same for every row has no correlation; the score is then NaN, which says it.
            warnings.filterwarnings("ignore", message="An input array is constant")
            result = metric.compute(predictions=predictions, references=output.label_ids)
        return {name: float(value) for name, value in (result or {}).items()}

    return score
