"""The rows that the comparison writes."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.records import Origin


@dataclass(frozen=True, kw_only=True)
class Epoch(Origin):
    """One epoch of one run."""

    task: str  # of :data:`benchmarks.frontier.tasks.TRAININGS`
    method: str  # of :data:`benchmarks.frontier.methods.METHODS`
    seed: int  # of the classifier, the order of the rows, dropout and the method
    epoch: int  # which one, from 1
    epochs: int  # how many the run has
    metric: str  # name of the score
    score: float  # on the dev set
    dev_loss: float  # on the dev set
    train_loss: float  # mean over the epoch's batches
    steps: int  # so far
    seconds: float  # of the whole run, other runs beside it
    batch: int  # rows per step
    learning_rate: float  # at its highest
    rows: int  # of the training set
    settings: str  # of the method, by :meth:`benchmarks.frontier.methods.Method.settings`
    dropout: str = ""  # "by step" where all methods have the exact run's masks of dropout; empty where they have others
    fitted_loss: float | None = None  # on the training set, evaluated as the dev set is; empty where it is not


@dataclass(frozen=True, kw_only=True)
class Cost(Origin):
    """What a training step with one method takes, on one batch of a task."""

    task: str  # of :data:`benchmarks.frontier.tasks.TRAININGS`, or a study
    method: str  # of :data:`benchmarks.frontier.methods.METHODS`
    batch: str = ""  # its shape, rows × tokens, none of which is padding
    # bytes that autograd saves, by the ledger; empty where hooks of the method store them elsewhere
    saved: int | None = None
    # live bytes between forward and backward pass, and what a method holds from step to step; of a compiled step, the
    # saved ones
    kept: int | None = None
    host: int | None = None  # bytes that wait outside of that memory between the passes; empty where nothing does
    # live bytes that a step makes at its peak, gradients among them; of a compiled step, by the allocator
    peak: int | None = None
    rss: int | None = None  # what a step adds to the peak of the resident set; empty where there is no /proc
    seconds: float | None = None  # median of a step, steps of all methods in turns
    lower: float | None = None  # lower quartile of the same
    upper: float | None = None  # upper quartile
    time: float | None = None  # the median by the exact step's; of adapters, by exact LoRA's
    trained_batch: str = ""  # shape of a batch as large as those that are trained on
    trained_seconds: float | None = None  # as ``seconds``, on that batch
    trained_lower: float | None = None  # lower quartile
    trained_upper: float | None = None  # upper quartile
    trained_time: float | None = None  # the median by the exact step's
    settings: str = ""  # of the method, by :meth:`benchmarks.frontier.methods.Method.settings`
    plan: str = ""  # for plans: how many blocks do what
    status: str = "ok"  # "ok", or why there is nothing
    seed: int = 0  # of the model and the method


@dataclass(frozen=True, kw_only=True)
class Point(Origin):
    """One evaluation of one run of a study."""

    study: str  # of :data:`benchmarks.frontier.study.TITLES`
    method: str  # of :data:`benchmarks.frontier.methods.METHODS`
    seed: int  # of the weights, the order of the rows and the method
    batch: int  # rows per step
    step: int  # so far
    steps: int  # of the run
    epoch: float  # how often the training set was seen so far
    train_loss: float  # mean over the steps since the last evaluation
    dev_loss: float  # on held-out rows
    metric: str  # name of the score
    score: float  # on held-out rows
    seconds: float  # of the whole run, other runs beside it
    learning_rate: float  # at its highest
    settings: str  # of the method, by :meth:`benchmarks.frontier.methods.Method.settings`


@dataclass(frozen=True, kw_only=True)
class Noisy(Origin):
    """Variances of the gradient of one block at one moment of one run, on the batch of that step."""

    study: str  # of :data:`benchmarks.frontier.study.TITLES`
    method: str  # of :data:`benchmarks.frontier.methods.METHODS`
    seed: int  # of the run
    batch: int  # rows per step
    step: int  # so far
    operation: str  # which stand-ins add to the noise, or "all"
    block: str  # whose parameters
    noise: float  # σ D² of the stand-ins
    sgd: float  # σ D²_SGD, over rows
