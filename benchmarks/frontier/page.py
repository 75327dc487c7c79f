"""The tables of ``docs/comparison.md``, from the csv files."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.frontier.compared import (
    TITLES,
    apart_of,
    comparable,
    loss_text,
    score_text,
    scores_of,
    share_of,
    share_text,
    tasks_of,
    together_and_apart,
)
from benchmarks.frontier.means import mean_text
from benchmarks.frontier.methods import EXACT, METHODS
from benchmarks.frontier.rows import Cost, Epoch
from benchmarks.frontier.shares import Share, share_table
from benchmarks.records import Origin, known_rows
from rmm_linear._support.tables import table

NOTHING = "Nothing is measured yet: run `python -m benchmarks frontier`."
_ALL_OF_IT = "sst2-full"
_FIELDS = ("saved", "kept", "peak", "rss", "time", "trained_time")
_DIFFERENCES = {"score": score_text, "training loss": loss_text}


def page(results: Path) -> str:
    """Make the tables.

    Args:
        results: Folder of the csv files.

    Returns:
        A section for every part that was measured.
    """
    epochs = known_rows(results / "frontier-accuracy.csv", Epoch)
    costs = known_rows(results / "frontier-cost.csv", Cost)
    parts = list[str]()
    if costs:
        tasks = tasks_of(epochs, costs)
        costs = [row for row in costs if row.task in tasks]
        epochs = [row for row in epochs if row.task in (*tasks, _ALL_OF_IT)]
        parts += [
            "### Fine-tuning",
            _FINE_TUNING,
            comparison(comparable(epochs, costs), costs),
            *_scatter(costs),
            f"{_batches(costs)}\n{_HOW}\n{_masks(epochs)}",
            _PICTURES,
            *_further(epochs, costs),
            *_full(epochs),
            origins([*costs, *epochs]),
        ]
    if rows := known_rows(results / "frontier-shares.csv", Share):
        parts += ["### What sketches and codes cost", _SHARES, share_table(rows), _SHARES_PICTURE, origins(rows)]
    return "\n\n".join(parts) or NOTHING


def comparison(epochs: Sequence[Epoch], costs: Sequence[Cost]) -> str:
    """Make the table of methods.

    Args:
        epochs: All runs.
        costs: All measurements of steps.

    Returns:
        A line per method.
    """
    tasks = tasks_of(epochs, costs)
    together, apart = together_and_apart(tasks)
    header = [
        "method",
        "saved",
        "kept",
        "peak",
        "RSS",
        "time",
        "time, trained",
        *(TITLES[task] for task in tasks),
        *(f"{what} to exact" for what in _DIFFERENCES),
        *(f"{what} to exact, {TITLES[task]}" for task in apart for what in _DIFFERENCES),
        "seeds",
    ]
    lines = list[tuple[str, ...]]()
    for method, how in METHODS.items():
        shown = EXACT if how.is_exact else method
        scores = [scores_of(epochs, task, shown) for task in tasks]
        share = [share_text(share_of(costs, tasks, method, field), field) for field in _FIELDS]
        if not any(scores) and not any(share):
            continue
        over = [together, *([task] for task in apart)]
        differences = [text(epochs, of, method) for of in over for text in _DIFFERENCES.values()]
        counts = [str(len(score)) for score in scores]
        seeds = counts[0] if len({*counts}) == 1 else " / ".join(counts)
        lines.append((how.title, *share, *(mean_text(score, 1, factor=100) for score in scores), *differences, seeds))
    return table(header, lines)


def _further(epochs: Sequence[Epoch], costs: Sequence[Cost]) -> list[str]:
    """Show methods on tasks for which they have more seeds than all methods have."""
    compared, lines = comparable(epochs, costs), list[tuple[str, ...]]()
    for task in tasks_of(epochs, costs):
        for method, how in METHODS.items():
            scores = scores_of(epochs, task, method)
            if len(scores) == len(scores_of(compared, task, method)):
                continue
            apart = [100 * each for each in apart_of(epochs, task, method)]
            below = f"{sum(each < 0 for each in apart)} of {len(apart)}"
            others = ["", "", ""]
            if apart and not how.is_exact:
                others = [mean_text(apart, 1, sign=True), mean_text([statistics.median(apart)], 1, sign=True), below]
            lines.append((TITLES[task], how.title, str(len(scores)), mean_text(scores, 1, factor=100), *others))
    names = ("task", "method", "seeds", "score", "score to exact", "median", "below exact")
    return [_ALL_SEEDS, table(names, lines)] if lines else []


def _scatter(costs: Sequence[Cost]) -> list[str]:
    """How far times of one method were apart."""
    parts = list[str]()
    for what, fields in (
        ("times", ("lower", "seconds", "upper")),
        ("those of batches as trained on", ("trained_lower", "trained_seconds", "trained_upper")),
    ):
        apart: dict[str, list[float]] = {}
        for row in costs:
            lower, median, upper = (getattr(row, field) for field in fields)
            if lower and upper:
                apart.setdefault(row.task, []).append(100 * max(upper - median, median - lower) / median)
        each = [f"{statistics.median(of):.0f} / {max(of):.0f} % on {TITLES[task]}" for task, of in apart.items()]
        parts += [f"{what}, {', '.join(each)}"] if each else []
    return [_SCATTER.format("; of ".join(parts))] if parts else []


def _batches(costs: Sequence[Cost]) -> str:
    """Say on which batches costs were measured."""
    shapes = {row.task: (row.batch, row.trained_batch) for row in costs if row.batch}
    each = [f"{TITLES[task]} {large} and {trained}" for task, (large, trained) in shapes.items()]
    return _BATCHES.format(", ".join(each))


def _full(epochs: Sequence[Epoch]) -> list[str]:
    runs = [row for row in epochs if row.task == _ALL_OF_IT and row.epoch == row.epochs]
    lines = [
        (METHODS[row.method].title, str(row.seed), f"{100 * row.score:.1f}", f"{row.train_loss:.4f}") for row in runs
    ]
    return [_ALL_ROWS, table(("method", "seed", "accuracy", "training loss"), lines)] if lines else []


def _masks(epochs: Sequence[Epoch]) -> str:
    """Say which runs have the exact run's masks of dropout."""
    seeds = {task: dict.fromkeys(row.seed for row in epochs if row.task == task) for task in TITLES}
    same = {
        task: [seed for seed in found if all(row.dropout for row in epochs if (row.task, row.seed) == (task, seed))]
        for task, found in seeds.items()
    }
    there = [
        f"{TITLES[task]} (seed{'s' if len(found) > 1 else ''} {', '.join(map(str, sorted(found)))})"
        for task, found in same.items()
        if found
    ]
    if not there:
        return f"- Methods {_OWN_MASKS}"
    if all(len(same[task]) == len(found) for task, found in seeds.items()):
        return f"- {_SAME_MASKS}."
    return f"- {_SAME_MASKS} on {', '.join(there)}. In other runs, methods {_OWN_MASKS}"


def origins(rows: Sequence[Origin]) -> str:
    """Say where rows come from.

    Args:
        rows: Of one command.

    Returns:
        A sentence.
    """
    commits = ", ".join(f"`{commit[:12]}`" for commit in dict.fromkeys(row.commit for row in rows))
    machines, torch, transformers = (
        ", ".join(dict.fromkeys(getattr(row, what) for row in rows)) for what in ("machine", "torch", "transformers")
    )
    return (
        f"Measured on {machines}, PyTorch {torch}, transformers {transformers}, commits {commits}, "
        f"until {max(row.date for row in rows)[:10]}."
    )


_FINE_TUNING = (
    "MiniLM in RoBERTa's classes, two epochs on the first 6,000 sentences of SST-2 and on all of the other tasks. "
    "Scores are accuracy, Matthews' and Pearson's correlation × 100 on the dev set after the last epoch, mean ± "
    "standard error over seeds; beside them the difference to the exact run of the same seed, and by how much the loss "
    "over the last epoch's batches is above the exact one's, means over tasks, with errors as of independent tasks. "
    "STS-B is not among these means but has its own: there, scores and losses are mostly a matter of when runs leave a "
    "plateau, and would hide all others. Seeds are those that all methods were trained with. Bytes and times are by "
    "the exact step's, means over all of these tasks:"
)
_ALL_SEEDS = "With all seeds, where some methods have more of them:"
_ALL_ROWS = (
    "One epoch on all 67,349 sentences of SST-2; the training loss is the mean over the epoch. An accuracy of the dev "
    "set's 872 rows has a standard error of 1.0 or so:"
)
_SAME_MASKS = "Runs of one seed have the same masks of dropout in every step"
_OWN_MASKS = (
    "that draw random numbers have masks of dropout of their own, a part of their difference to the exact run "
    "of the same seed."
)
_BATCHES = (
    "- Rows × tokens of the batches on which costs are measured, the large one and the one as in training: {}. So "
    "sequences are short, and attention is a small part of a step."
)
_SCATTER = "The middle half of the rounds lies this far from the median, for half of the methods / for all: of {}."
_HOW = """\
- *Saved*: by the ledger, which does not see what hooks of checkpointing, of GACT's rule and of some plans store.
  *Kept*: alive between the two passes. *Peak*: live at the peak of a forward and a backward pass, gradients of
  parameters among it. *RSS*: added to the resident set of the process, where tensors that are freed leave it; only
  this sees what operators need for a moment. *Time*: of forward and backward pass without the optimizer, medians, all
  methods in turns. All on one batch of about 2,048 tokens of each task without padding; *time, trained* on one of 32
  rows, as in training. Parameters and AdamW's states come on top; with LoRA, nearly all parameters are frozen and have
  neither gradients nor states.
- *Ours, default*: `convert(model)`. *Linears only*: `operations=("linear",)`. *Wide*: no sketch, `ratio=1.0`, and 8
  bits per element, 4 of norms' inputs. *Narrow*: `memory=0.05`, and 2 bits per element, 4 of attention's.
- Tasks that some method has less than three seeds of are not here yet. Seeds draw the classifier, the order of the
  rows, dropout and the method; pretrained weights, rows and dev sets are the same. With three seeds, a 95 % interval
  is ± 4.3 standard errors; all methods are compared with the same exact runs, so their differences go together. And a
  dev set is a sample: an accuracy p of n rows has a standard error of √(p(1 − p)/n), 1.2 on SST-2's 872 rows and 3.0
  on RTE's 277, a correlation that is not high one of about 1/√n, 3.1 on CoLA's 1,043, of which differences on the same
  rows have a part.
- Batches of 32 rows of like length, learning rate 1e-4 for all but LoRA and VeLoRA (1e-3), the published optimizer and
  schedule: one rate and short training for all. Other rates may suit other methods better. Scores are far below those
  published for RoBERTa-base after ten epochs (CoLA: 60.9), so what is lost near those is not seen here.
- *Checkpointing* has the scores of the exact model, whose gradients it has to the bit.
- *Gaussian sketch*: the published layer, a dense S of PyTorch's random numbers, in place of all linear layers but the
  head. S has N · K entries: its share of the time grows with the batch.
- *WTA-CRS*: our layers with the paper's selection and without the bias that its code has, in place of all linear
  layers but the head, a selection each; gradient norms of an example are known from its second epoch on, so in half of
  the training. Its own implementation packs activations besides.
- *Few-bit GELU*: the paper's derivative in plain PyTorch; its authors have a fused kernel.
- *GACT's rule*: 4 bits per element of all that is saved, packed by our kernels in groups of 64, and eager attention.
- *LoRA*, *VeLoRA*: from PEFT 0.21.2, rank 16 on all linear layers, the head trained whole; VeLoRA with 64 groups. *And
  ours on it*: the model with LoRA, converted by default.
- *fit, least + 10 %*: a budget that far from the least peak of any plan to the exact one."""
_PICTURES = (
    "![Scores, losses and times of all methods against what they keep](../benchmarks/results/frontier.png)\n\n"
    "![Scores of every task against bytes](../benchmarks/results/frontier-tasks.png)"
)
_SHARES = (
    "A training step of models that are converted by default, and of one with a sketch of linear layers alone: ours "
    "without packing, and the published one. All have four blocks, 768 wide, and random weights; the LLaMA's head has "
    "a vocabulary of 32,000, so that its loss is a larger part of the step than in deeper models. In PyTorch's "
    "profiler, whose own time is in it: what an operator takes, with all that it calls, and without the matrix "
    "products in it that exact training has too, such as dW; those of attention's scores, computed again, are left out "
    "with them, and products with S are not. CountSketch has no matrix S to draw: a row and a sign per token are made "
    "where they are used:"
)
_SHARES_PICTURE = "![Shares of a training step](../benchmarks/results/frontier-shares.png)"
