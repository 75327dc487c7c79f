"""Score predictions with the official GLUE metrics, through `evaluate`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import datasets
import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import EvalPrediction

from glue_finetune.errors import one_line
from glue_finetune.tasks import Task

logger = logging.getLogger(__name__)

_ACCURACY = ("sst2", "mnli", "qnli", "rte", "wnli")
_ACCURACY_AND_F1 = ("mrpc", "qqp")
_CONFIGS = ("cola", "stsb", *_ACCURACY_AND_F1, *_ACCURACY)


class GlueScores(evaluate.Metric):
    """The official metric of one GLUE task; the configuration name is the task. It answers as the hub's `glue` does."""

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in _CONFIGS:
            raise KeyError(f"The configuration must be one of {', '.join(_CONFIGS)}, got {self.config_name!r}.")
        value = datasets.Value("float32" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description="The official metrics of the GLUE benchmark.",
            citation="Wang et al. 2019, GLUE, https://openreview.net/forum?id=rJ4km2R5t7",
            inputs_description="predictions and references: as many class numbers each; scores for stsb.",
            features=datasets.Features({"predictions": value, "references": value}),
            format="numpy",
        )

    def _compute(self, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
        if self.config_name == "cola":
            return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}
        if self.config_name == "stsb":
            return {
                "pearson": float(np.asarray(pearsonr(predictions, references))[0]),
                "spearmanr": float(np.asarray(spearmanr(predictions, references))[0]),
            }
        scores = {"accuracy": float(accuracy_score(references, predictions))}
        if self.config_name in _ACCURACY_AND_F1:
            scores["f1"] = float(f1_score(references, predictions))
        return scores


def load_metric(task: Task, source: str = "shipped") -> evaluate.EvaluationModule:
    """Load the metric of a task, which holds its rows in memory and writes no file.

    The shipped one is the default: it gives the hub's numbers, never waits for a network, and runs no code that was
    downloaded.

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
    return GlueScores(task.name, keep_in_memory=True)


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
