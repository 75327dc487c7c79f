"""Tables of long training: does noise accumulate?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.frontier.means import mean_text
from benchmarks.frontier.methods import EXACT, METHODS
from benchmarks.frontier.rows import Epoch
from rmm_linear._support.tables import table

TASK, _SLOW, _RAISED = "cola-long", "cola-slow", "cola-raised"


def long_sections(epochs: Sequence[Epoch]) -> list[str]:
    """Make the section.

    Args:
        epochs: All runs.

    Returns:
        Its parts; none if nothing was measured.
    """
    if not any(row.task == TASK for row in epochs):
        return []
    parts = ["### Ten epochs", _LONG, by_epoch(epochs), _PICTURE]
    if any(row.task == _SLOW for row in epochs):
        parts += [_AT_THE_PUBLISHED_RATE, by_epoch(epochs, _SLOW)]
    raised = [replace(row, task=_SLOW) for row in epochs if row.task == _RAISED]
    exact = [row for row in epochs if row.task == _SLOW and row.method == EXACT]
    if raised and exact:
        parts += [_AT_A_RAISED_RATE, by_epoch([*exact, *raised], _SLOW)]
    return parts


def by_epoch(epochs: Sequence[Epoch], task: str = TASK) -> str:
    """Make the table.

    Args:
        epochs: All runs.
        task: The long one.

    Returns:
        A line per epoch: of exact training the loss of the epoch's batches, the loss on the training set and the score,
        and of every other method the differences to the exact run of the same seed.
    """
    here = {(row.method, row.seed, row.epoch): row for row in epochs if row.task == task}
    methods = [method for method in METHODS if any(key[0] == method for key in here)]
    names, lines = ["epoch"], list[tuple[str, ...]]()
    for method in methods:
        names += [f"{METHODS[method].title}: {what}" for what in _COLUMNS]
    for number in sorted({epoch for _, _, epoch in here}):
        cells = list[str]()
        for method in methods:
            rows = [row for (name, _, epoch), row in here.items() if (name, epoch) == (method, number)]
            if method != EXACT:
                rows = [_less(row, here[key]) for row in rows if (key := (EXACT, row.seed, number)) in here]
            sign = method != EXACT
            cells += [mean_text([row.train_loss for row in rows], 4, sign=sign)]
            cells += [mean_text([row.fitted_loss or 0.0 for row in rows], 4, sign=sign)]
            cells += [mean_text([row.score for row in rows], 1, factor=100, sign=sign)]
        lines.append((str(number), *cells))
    return table(names, lines)


def _less(row: Epoch, exact: Epoch) -> Epoch:
    """Return a row with the differences to the exact run in place of the losses and the score."""
    return replace(
        row,
        train_loss=row.train_loss - exact.train_loss,
        fitted_loss=(row.fitted_loss or 0.0) - (exact.fitted_loss or 0.0),
        score=row.score - exact.score,
    )


_COLUMNS = ("batches", "training set", "score")
_LONG = (
    "Does noise accumulate? CoLA, ten epochs in batches of 16, optimizer, decay and warm-up as published, at ten "
    "times the published learning rate, 1e-4, as the model has a fifth of the parameters: the mean loss of the "
    "epoch's batches, with dropout and while weights change, the loss on the whole training set without dropout, "
    "evaluated after every epoch, and Matthews' correlation × 100 on the dev set. Of exact training, and of the others "
    "the differences to the exact run of the same seed, mean ± standard error over seeds; without ± there is one:"
)
_AT_THE_PUBLISHED_RATE = "At the published learning rate, 1e-5:"
_AT_A_RAISED_RATE = (
    "The default at a learning rate that is higher by a tenth, 1.1e-5, by the same exact runs at 1e-5. AdamW divides "
    "by the size of gradients, noise among it, so noise shortens its steps; √1.2 is 1.1 for noise of a fifth. "
    "Exact training was not run at that rate:"
)
_PICTURE = "![Losses and score by epoch](../benchmarks/results/frontier-long.png)"
