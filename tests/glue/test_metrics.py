"""The shipped metric module computes the official metrics, and needs no network for it."""

import logging
import math

import evaluate
import numpy as np
import pytest
from transformers import EvalPrediction

from glue_finetune import scoring
from glue_finetune.tasks import TASKS
from glue_finetune.training import collect_epochs

TRUTH, GUESS = [1, 1, 1, 0, 0, 1, 0, 1], [1, 1, 0, 0, 1, 1, 0, 1]
# 4 true positives, 2 true negatives, 1 false positive, 1 false negative.
ACCURACY, F1 = 6 / 8, 8 / 10
MATTHEWS = (4 * 2 - 1 * 1) / math.sqrt(5 * 5 * 3 * 3)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("cola", {"matthews_correlation": MATTHEWS}),
        ("mrpc", {"accuracy": ACCURACY, "f1": F1}),
        ("qqp", {"accuracy": ACCURACY, "f1": F1}),
        *[(task, {"accuracy": ACCURACY}) for task in ("sst2", "mnli", "qnli", "rte", "wnli")],
    ],
)
def test_classes(task, expected):
    metric = scoring.load_metric(TASKS[task])
    assert metric.compute(predictions=GUESS, references=TRUTH) == pytest.approx(expected)


def test_scores():
    guess, truth = [1.0, 2.0, 3.0, 5.0], [2.0, 1.0, 4.0, 3.0]
    centred = np.array(guess) - np.mean(guess), np.array(truth) - np.mean(truth)
    pearson = (centred[0] @ centred[1]) / math.sqrt((centred[0] @ centred[0]) * (centred[1] @ centred[1]))
    spearman = 1 - 6 * (1 + 1 + 1 + 1) / (4 * (16 - 1))  # ranks 1 2 3 4 against 2 1 4 3
    metric = scoring.load_metric(TASKS["stsb"])
    result = metric.compute(predictions=guess, references=truth)
    assert result == pytest.approx({"pearson": pearson, "spearmanr": spearman}, rel=1e-6)


def test_the_scorer_takes_the_models_outputs():
    logits = np.array([[0.1, 2.0], [3.0, -1.0], [0.0, 0.5], [1.0, 0.0]])
    score = scoring.make_scorer(TASKS["sst2"])
    assert score(EvalPrediction(predictions=logits, label_ids=np.array([1, 0, 0, 0]))) == {"accuracy": 0.75}
    regress = scoring.make_scorer(TASKS["stsb"])
    outputs = EvalPrediction(predictions=np.array([[0.0], [1.0], [2.0]]), label_ids=np.array([1.0, 3.0, 5.0]))
    assert regress(outputs) == pytest.approx({"pearson": 1.0, "spearmanr": 1.0})


def test_a_constant_answer_has_no_correlation():
    constant = EvalPrediction(predictions=np.ones((3, 1)), label_ids=np.array([1.0, 3.0, 5.0]))
    assert all(math.isnan(value) for value in scoring.make_scorer(TASKS["stsb"])(constant).values())


def test_without_the_hub_the_shipped_metric_steps_in_and_says_so(monkeypatch, caplog):
    asked = []

    def offline(path, *args, **kwargs):
        asked.append(path)
        raise FileNotFoundError("no connection")

    monkeypatch.setattr(evaluate, "load", offline)
    with caplog.at_level(logging.WARNING, "glue_finetune"):
        metric = scoring.load_metric(TASKS["cola"], "hub")
    assert asked == ["glue"]
    assert "no connection" in caplog.text
    assert metric.compute(predictions=GUESS, references=TRUTH) == pytest.approx({"matthews_correlation": MATTHEWS})
    asked.clear()
    scoring.load_metric(TASKS["cola"])
    assert asked == []


def test_a_loss_that_is_not_finite_is_none():
    history = [{"loss": math.nan, "step": 2, "epoch": 1.0}, {"eval_accuracy": math.inf, "step": 2, "epoch": 1.0}]
    (entry,) = collect_epochs(history)
    assert entry["train_loss"] is None
    assert entry["accuracy"] is None
