"""The nine GLUE tasks: columns, labels, metrics, and the settings of the paper for each."""

from __future__ import annotations

import dataclasses
from typing import Any

from glue_finetune.errors import UserError
from rmm_linear._support.validation import did_you_mean


@dataclasses.dataclass(frozen=True)
class Task:
    """One GLUE task.

    Attributes:
        name: Its name on the command line and on the hub.
        folder: Name of its folder in the official layout.
        texts: Text columns of the official files, one or two.
        label: Label column of the official files.
        labels: Label values as written in the files; the position is the class. Empty for a regression.
        metrics: Official metrics, the one to report first.
        batch: Batch size of the paper.
        lr: Learning rate of the paper.
        hub_texts: Text columns on the hub where they differ from the official files.
        header: Columns of a file that has no header line; None where the first line is the header.
        dev: Name of a dev set to the stem of its file; the name is "" where there is only one.
        skip_short_rows: Skip rows that lack fields, as the hub's copy does; False makes them an error.
    """

    name: str
    folder: str
    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    batch: int
    lr: float
    hub_texts: tuple[str, ...] = ()
    header: tuple[str, ...] | None = None
    dev: tuple[tuple[str, str], ...] = (("", "dev"),)
    skip_short_rows: bool = False

    @property
    def is_regression(self) -> bool:
        """Whether the label is a score instead of a class."""
        return not self.labels

    @property
    def main_metric(self) -> str:
        """Name of the reported metric; with two dev sets that of the first one, as in "matched_accuracy"."""
        prefix = self.dev[0][0]
        return f"{prefix}_{self.metrics[0]}" if prefix else self.metrics[0]


_MATTHEWS, _ACCURACY, _F1 = ("matthews_correlation",), ("accuracy",), ("accuracy", "f1")
_CORRELATIONS = ("pearson", "spearmanr")
_PAIR, _QUESTIONS = ("sentence1", "sentence2"), ("question1", "question2")
_NLI, _NLI3, _BINARY = ("entailment", "not_entailment"), ("entailment", "neutral", "contradiction"), ("0", "1")
_MNLI_DEV = (("matched", "dev_matched"), ("mismatched", "dev_mismatched"))

# Batch and learning rate: Bershatsky et al. 2022, arXiv 2201.13195.
# fmt: off
TASKS: dict[str, Task] = {task.name: task for task in (
    #    name    folder   texts                           label           labels   metrics        batch lr
    Task("cola", "CoLA",  ("sentence",),                  "label",        _BINARY, _MATTHEWS,     16, 1e-5,
         header=("source", "label", "star", "sentence")),
    Task("mnli", "MNLI",  _PAIR,                          "gold_label",   _NLI3,   _ACCURACY,     16, 1e-5,
         hub_texts=("premise", "hypothesis"), dev=_MNLI_DEV),
    Task("mrpc", "MRPC",  ("#1 String", "#2 String"),     "Quality",      _BINARY, _F1,           16, 1e-5,
         hub_texts=_PAIR),
    Task("qnli", "QNLI",  ("question", "sentence"),       "label",        _NLI,    _ACCURACY,     16, 1e-5),
    Task("qqp",  "QQP",   _QUESTIONS,                     "is_duplicate", _BINARY, _F1,           32, 1e-5,
         skip_short_rows=True),
    Task("rte",  "RTE",   _PAIR,                          "label",        _NLI,    _ACCURACY,     16, 2e-5),
    Task("sst2", "SST-2", ("sentence",),                  "label",        _BINARY, _ACCURACY,     32, 2e-5),
    Task("stsb", "STS-B", _PAIR,                          "score",        (),      _CORRELATIONS, 16, 1e-5),
    Task("wnli", "WNLI",  _PAIR,                          "label",        _BINARY, _ACCURACY,     32, 1e-5),
)}
# fmt: on

PAPER: dict[str, Any] = {  # the same for every task in the paper
    "num_train_epochs": 10.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.98,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.1,
    "lr_scheduler_type": "polynomial",
    "warmup_steps": 0.06,  # of all steps
}
MAX_SEQ_LENGTH = 512


def get_task(name: str) -> Task:
    """Look a task up by name, in any spelling of case and dashes ("SST-2" is "sst2"); a UserError if there is none."""
    task = TASKS.get(name.lower().replace("-", "").replace("_", ""))
    if task is None:
        raise UserError(f"task_name must be one of {', '.join(TASKS)}, got {name!r}.{did_you_mean(name, TASKS)}")
    return task


def training_defaults(task: Task) -> dict[str, Any]:
    """Return the paper's settings for a task, under the names of transformers' TrainingArguments."""
    return {**PAPER, "per_device_train_batch_size": task.batch, "learning_rate": task.lr}
