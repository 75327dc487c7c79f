"""The rows that the comparison writes."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.records import Origin


@dataclass(frozen=True, kw_only=True)
class Epoch(Origin):
    """One epoch of one run.

    Attributes:
        task: Of :data:`benchmarks.frontier.tasks.TRAININGS`.
        method: Of :data:`benchmarks.frontier.methods.METHODS`.
        seed: Of the classifier, the order of the rows, dropout and the method.
        epoch: Which one, from 1.
        epochs: How many the run has.
        metric: Name of the score.
        score: On the dev set.
        dev_loss: On the dev set.
        train_loss: Mean over the epoch's batches.
        fitted_loss: On the training set, evaluated as the dev set is; empty where it is not.
        steps: So far.
        seconds: Of the whole run, other runs beside it.
        batch: Rows per step.
        learning_rate: At its highest.
        rows: Of the training set.
        settings: Of the method, by :meth:`benchmarks.frontier.methods.Method.settings`.
        dropout: "by step" where all methods have the exact run's masks of dropout; empty where they have others.
    """

    task: str
    method: str
    seed: int
    epoch: int
    epochs: int
    metric: str
    score: float
    dev_loss: float
    train_loss: float
    steps: int
    seconds: float
    batch: int
    learning_rate: float
    rows: int
    settings: str
    dropout: str = ""
    fitted_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class Cost(Origin):
    """What a training step with one method takes, on one batch of a task.

    Attributes:
        task: Of :data:`benchmarks.frontier.tasks.TRAININGS`.
        method: Of :data:`benchmarks.frontier.methods.METHODS`.
        batch: Its shape, rows × tokens, none of which is padding.
        saved: Bytes that autograd saves, by the ledger; empty where hooks of the method store them elsewhere.
        kept: Live bytes between forward and backward pass.
        peak: Live bytes that a step makes at its peak, gradients among them.
        rss: What a step adds to the peak of the resident set; empty where there is no /proc.
        seconds: Median of a step, steps of all methods in turns.
        lower: Lower quartile of the same.
        upper: Upper quartile.
        time: The median by the exact step's.
        trained_batch: Shape of a batch as large as those that are trained on.
        trained_seconds: As ``seconds``, on that batch.
        trained_lower: Lower quartile.
        trained_upper: Upper quartile.
        trained_time: The median by the exact step's.
        settings: Of the method, by :meth:`benchmarks.frontier.methods.Method.settings`.
        plan: For plans: how many blocks do what.
        status: "ok", or why there is nothing.
        seed: Of the model and the method.
    """

    task: str
    method: str
    batch: str = ""
    saved: int | None = None
    kept: int | None = None
    peak: int | None = None
    rss: int | None = None
    seconds: float | None = None
    lower: float | None = None
    upper: float | None = None
    time: float | None = None
    trained_batch: str = ""
    trained_seconds: float | None = None
    trained_lower: float | None = None
    trained_upper: float | None = None
    trained_time: float | None = None
    settings: str = ""
    plan: str = ""
    status: str = "ok"
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Point(Origin):
    """One evaluation of one run of a study.

    Attributes:
        study: "images" or "language".
        method: Of :data:`benchmarks.frontier.methods.METHODS`.
        seed: Of the weights, the order of the rows and the method.
        batch: Rows per step.
        step: So far.
        steps: Of the run.
        epoch: How often the training set was seen so far.
        train_loss: Mean over the steps since the last evaluation.
        dev_loss: On held-out rows.
        metric: Name of the score.
        score: On held-out rows.
        seconds: Of the whole run, other runs beside it.
        learning_rate: At its highest.
        settings: Of the method, by :meth:`benchmarks.frontier.methods.Method.settings`.
    """

    study: str
    method: str
    seed: int
    batch: int
    step: int
    steps: int
    epoch: float
    train_loss: float
    dev_loss: float
    metric: str
    score: float
    seconds: float
    learning_rate: float
    settings: str


@dataclass(frozen=True, kw_only=True)
class Noisy(Origin):
    """Variances of the gradient of one block at one moment of one run, on the batch of that step.

    Attributes:
        study: "images" or "language".
        method: Of :data:`benchmarks.frontier.methods.METHODS`.
        seed: Of the run.
        batch: Rows per step.
        step: So far.
        operation: Which stand-ins add to the noise, or "all".
        block: Whose parameters.
        noise: Σ D² of the stand-ins.
        sgd: Σ D²_SGD, over rows.
    """

    study: str
    method: str
    seed: int
    batch: int
    step: int
    operation: str
    block: str
    noise: float
    sgd: float
