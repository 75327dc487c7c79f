"""Does ``effective_batch`` predict anything? The batch that noise predicts, and the one that training finds."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.frontier.means import mean_text
from benchmarks.frontier.methods import EXACT, METHODS
from benchmarks.frontier.rows import Noisy, Point
from rmm_linear._support.tables import table
from rmm_linear.variance import effective_batch

TITLES = {"language": "LLaMA on glosses", "images": "ViT on digits"}
BATCHES = {"language": 8, "images": 64}
_OF = ("the whole gradient", "the median block")
_LEAST = 0.01  # of the minibatch's noise, below which a prediction says next to nothing


@dataclass(frozen=True)
class Prediction:
    """One run of a noisy method.

    Attributes:
        study: Of :data:`TITLES`.
        method: Of :data:`benchmarks.frontier.methods.METHODS`.
        step: At which losses are compared.
        noises: D² by D²_SGD, means over the moments before the step: of the whole gradient, and of the median block.
        found: The batch with which exact training of the same seed has the same loss; None outside of those run.
        found_text: The same, or beyond which batch it is.
        loss: Held out.
    """

    study: str
    method: str
    step: int
    noises: tuple[float, float]
    found: float | None
    found_text: str
    loss: float

    @property
    def predicted(self) -> list[float]:
        """The batches that the noises predict."""
        return [effective_batch(BATCHES[self.study], noise) for noise in self.noises]


def prediction_sections(points: Sequence[Point], noises: Sequence[Noisy]) -> list[str]:
    """Make the section.

    Args:
        points: All evaluations.
        noises: All measurements.

    Returns:
        Its parts; none for studies whose smaller batches were not run.
    """
    runs = [one for study in BATCHES for one in predictions(study, points, noises)]
    if not runs:
        return []
    return [
        "### Does the noise predict anything?",
        _PREDICTED,
        prediction_table(runs),
        *_exact(points, runs),
        verdict(runs),
    ]


def predictions(study: str, points: Sequence[Point], noises: Sequence[Noisy]) -> Iterator[Prediction]:
    """Compare, at the last evaluation before the first row comes again.

    Args:
        study: Of :data:`TITLES`.
        points: All evaluations.
        noises: All measurements.

    Yields:
        Every run of a noisy method whose seed has exact runs of several batches.
    """
    here = [row for row in points if row.study == study]
    step = _step(here, study)
    for method, seed in dict.fromkeys((row.method, row.seed) for row in noises if row.study == study):
        known = [row for row in noises if (row.study, row.method, row.seed) == (study, method, seed)]
        found = (
            _whole([row for row in known if row.step <= step]),
            _middle([row for row in known if row.step <= step]),
        )
        exact = {row.batch: row.dev_loss for row in here if (row.method, row.seed, row.step) == (EXACT, seed, step)}
        run = (method, seed, BATCHES[study], step)
        losses = [row.dev_loss for row in here if (row.method, row.seed, row.batch, row.step) == run]
        if losses and len(exact) > 1 and all(found):
            batch, text = _batch_of(losses[0], exact)
            ratios = (statistics.mean(found[0]), statistics.mean(found[1]))
            yield Prediction(study, method, step, ratios, batch, text, losses[0])


def prediction_table(runs: Sequence[Prediction]) -> str:
    """Make the table.

    Args:
        runs: All comparisons.

    Returns:
        A line per study and method: the median of noises over seeds, the batches predicted and found of every seed, and
        the least and the most of the batch predicted by the batch found.
    """
    lines = list[tuple[str, ...]]()
    for study, method in dict.fromkeys((run.study, run.method) for run in runs):
        seeds = [run for run in runs if (run.study, run.method) == (study, method)]
        ratios = [statistics.median(run.noises[place] for run in seeds) for place in (0, 1)]
        lines.append(
            (
                TITLES[study],
                METHODS[method].title,
                " / ".join(f"{ratio:.2g}" for ratio in ratios),
                " / ".join(", ".join(f"{run.predicted[place]:.1f}" for run in seeds) for place in (0, 1)),
                ", ".join(run.found_text for run in seeds),
                " / ".join(_spread(_by_found(seeds, place)) for place in (0, 1)),
                mean_text([run.loss for run in seeds], 4),
            )
        )
    names = ("study", "method", "noise", "batch predicted, by seed", "batch found", "predicted by found", "loss")
    return table(names, lines)


def verdict(runs: Sequence[Prediction]) -> str:
    """Say how far predictions are off.

    Args:
        runs: All comparisons.

    Returns:
        A sentence.
    """
    there = [run for run in runs if run.found is not None and run.noises[0] >= _LEAST]
    if not there:
        return _NOTHING
    parts = list[str]()
    for place, of in enumerate(_OF):
        found = _by_found(there, place)
        middle = math.exp(statistics.mean(map(math.log, found)))
        parts.append(
            f"by the noise of {of}, the batch predicted is {_spread(found)} of the batch found, {middle:.2g} in the "
            f"geometric mean, so off by a factor of up to {max(max(one, 1 / one) for one in found):.1f}"
        )
    return (
        f"{len(there)} of {len(runs)} runs have at least {100 * _LEAST:.0f} % of the minibatch's noise in the whole "
        "gradient, so that there is something to predict, and a batch found between those that were run. There, "
        f"{'; '.join(parts)}."
    )


def _exact(points: Sequence[Point], runs: Sequence[Prediction]) -> list[str]:
    """The losses that runs are compared with."""
    lines = list[tuple[str, ...]]()
    for study, step in dict.fromkeys((run.study, run.step) for run in runs):
        here = [row for row in points if (row.study, row.method, row.step) == (study, EXACT, step)]
        for batch in sorted({row.batch for row in here}):
            losses = [row.dev_loss for row in here if row.batch == batch]
            lines.append((TITLES[study], str(step), str(batch), mean_text(losses, 4)))
    return ["Exact training:", table(("study", "step", "batch", "loss"), lines)]


def _step(rows: Sequence[Point], study: str) -> int:
    return max((row.step for row in rows if row.batch == BATCHES[study] and row.epoch <= 1), default=0)


def _by_found(runs: Sequence[Prediction], place: int) -> list[float]:
    return [run.predicted[place] / run.found for run in runs if run.found is not None]


def _spread(ratios: Sequence[float]) -> str:
    texts = dict.fromkeys(f"{choose(ratios):.2g}" for choose in (min, max)) if ratios else ["?"]
    return " to ".join(texts)


def _batch_of(loss: float, exact: dict[int, float]) -> tuple[float | None, str]:
    """The batch with which exact training has this loss, between those that were run on a logarithmic scale."""
    sizes = sorted(exact)
    if loss <= exact[sizes[-1]]:
        return None, f"≥ {sizes[-1]}"
    for smaller, larger in itertools.pairwise(sizes):
        if exact[larger] <= loss <= exact[smaller]:
            part = (exact[smaller] - loss) / (exact[smaller] - exact[larger])
            batch = math.exp(math.log(smaller) + part * math.log(larger / smaller))
            return batch, f"{batch:.1f}"
    return None, f"< {sizes[0]}"


def _whole(rows: Sequence[Noisy]) -> list[float]:
    """The noise of the whole gradient by SGD's, at every moment."""
    found: dict[int, tuple[float, float]] = {}
    for row in (row for row in rows if row.operation == "all"):
        noise, sgd = found.get(row.step, (0.0, 0.0))
        found[row.step] = noise + row.noise, sgd + row.sgd
    return [noise / sgd for noise, sgd in found.values() if sgd]


def _middle(rows: Sequence[Noisy]) -> list[float]:
    """The median over blocks of the noise by SGD's, at every moment."""
    found: dict[int, list[float]] = {}
    for row in (row for row in rows if row.operation == "all" and row.sgd):
        found.setdefault(row.step, []).append(row.noise / row.sgd)
    return [statistics.median(each) for each in found.values()]


_NOTHING = (
    f"No run has both at least {100 * _LEAST:.0f} % of the minibatch's noise and a batch found between those that were "
    "run, so there is nothing to compare a prediction with."
)
_PREDICTED = (
    "`effective_batch` says which batch has as much noise without stand-ins. It is compared with exact training in "
    "smaller batches, by the held-out loss after as many steps, with the same learning rate: at the last evaluation "
    "before the first row comes again. The noise is the plain mean of the moments up to there that the table above "
    "shows: that of the whole gradient / of the median block, embeddings, last norm and head among the blocks, medians "
    "over seeds. Found is, for every seed, the batch whose exact loss of the same seed it is, between those that "
    "were run on a logarithmic scale; losses are mean ± standard error over seeds. AdamW divides by what it has seen "
    "of each coordinate's size, so no one ratio need be the right one:"
)
