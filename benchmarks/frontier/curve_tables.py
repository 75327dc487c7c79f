"""Tables of the models that are trained from scratch: what they reach, and whether their noise predicts anything."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.frontier.methods import EXACT, METHODS
from benchmarks.frontier.rows import Noisy, Point
from benchmarks.records import read_rows
from rmm_linear._support.tables import table
from rmm_linear.variance import effective_batch

_TITLES = {"language": "LLaMA on glosses", "images": "ViT on digits"}
BATCHES = {"language": 8, "images": 64}


def curve_sections(results: Path) -> list[str]:
    """Make the sections.

    Args:
        results: Folder of the csv files.

    Returns:
        Their parts; none if nothing was measured.
    """
    curves, noise = results / "frontier-curves.csv", results / "frontier-noise.csv"
    points = read_rows(curves, Point) if curves.is_file() else []
    noises = read_rows(noise, Noisy) if noise.is_file() else []
    parts = list[str]()
    if points:
        parts += ["### From scratch", _SCRATCH, reached(points), _PICTURE]
    if noises:
        parts += ["### Noise through training", _NOISE, through_training(noises)]
    if points and noises:
        parts += ["### Does the noise predict anything?", _PREDICTED, predictions(points, noises)]
    return parts


def reached(points: Sequence[Point]) -> str:
    """Make the table of what models reach.

    Args:
        points: All evaluations.

    Returns:
        A line per study and method.
    """
    lines = list[tuple[str, ...]]()
    for study, method in dict.fromkeys((row.study, row.method) for row in points):
        last = _last(points, study, method, BATCHES[study])
        if not last:
            continue
        exact = _last(points, study, EXACT, BATCHES[study])
        apart = [row.dev_loss - exact[seed].dev_loss for seed, row in last.items() if seed in exact]
        lines.append(
            (
                _TITLES[study],
                METHODS[method].title,
                _mean([row.train_loss for row in last.values()], 4),
                _mean([row.dev_loss for row in last.values()], 4),
                "" if method == EXACT else _mean(apart, 4, sign=True),
                _mean([100 * row.score for row in last.values()], 2),
                str(len(last)),
            )
        )
    names = ("study", "method", "training loss", "held-out loss", "by exact's", "score, %", "seeds")
    return table(names, sorted(lines, key=lambda line: list(_TITLES.values()).index(line[0])))


def through_training(noises: Sequence[Noisy]) -> str:
    """Make the table of noise by operation and depth.

    Args:
        noises: All measurements.

    Returns:
        A line per study, method, operation and block.
    """
    lines = list[tuple[str, ...]]()
    shares = list[list[str]]()
    for study in (name for name in _TITLES if any(row.study == name for row in noises)):
        here = [row for row in noises if row.study == study and row.method == "tenth"]
        steps = sorted({row.step for row in here})
        shares.append([str(step) for step in steps])
        for operation in dict.fromkeys(row.operation for row in here):
            for block in _ends(here):
                cells = [
                    _ratio([row for row in here if (row.operation, row.block, row.step) == (operation, block, step)])
                    for step in steps
                ]
                lines.append((_TITLES[study], operation, block, *cells))
    width = max((len(one) for one in shares), default=0)
    names = [" / ".join(dict.fromkeys(one[place] for one in shares if place < len(one))) for place in range(width)]
    return table(["study", "operation", "block", *(f"step {name}" for name in names)], lines)


def predictions(points: Sequence[Point], noises: Sequence[Noisy]) -> str:
    """Compare the batch that noise predicts with the batch of exact training that comes as far.

    Args:
        points: All evaluations.
        noises: All measurements.

    Returns:
        A line per study and noisy method.
    """
    lines = list[tuple[str, ...]]()
    for study, batch in BATCHES.items():
        exact = _exact_losses(points, study)
        for method in dict.fromkeys(row.method for row in noises if row.study == study):
            last = _last(points, study, method, batch)
            if len(exact) < 2 or not last:
                continue
            ratio = _whole([row for row in noises if (row.study, row.method) == (study, method)])
            loss = statistics.mean(row.train_loss for row in last.values())
            found = _batch_of(loss, exact)
            lines.append(
                (
                    _TITLES[study], METHODS[method].title, f"{ratio:.2g}", f"{effective_batch(batch, ratio):.1f}",
                    found, f"{loss:.4f}", f"{exact[batch]:.4f}",
                )
            )  # fmt: skip
    names = ("study", "method", "noise", "batch predicted", "batch found", "training loss", "exact's")
    return table(names, lines)


def _exact_losses(points: Sequence[Point], study: str) -> dict[int, float]:
    """The last training loss of exact runs, by batch, mean over seeds."""
    sizes = sorted({row.batch for row in points if (row.study, row.method) == (study, EXACT)})
    return {
        size: statistics.mean(row.train_loss for row in _last(points, study, EXACT, size).values()) for size in sizes
    }


def _batch_of(loss: float, exact: dict[int, float]) -> str:
    """The batch with which exact training has this loss, between those that were run on a logarithmic scale."""
    sizes = sorted(exact)
    if loss <= exact[sizes[-1]]:
        return f"≥ {sizes[-1]}"
    for smaller, larger in itertools.pairwise(sizes):
        if exact[larger] <= loss <= exact[smaller]:
            part = (exact[smaller] - loss) / (exact[smaller] - exact[larger])
            return f"{math.exp(math.log(smaller) + part * math.log(larger / smaller)):.1f}"
    return f"< {sizes[0]}"


def _last(points: Sequence[Point], study: str, method: str, batch: int) -> dict[int, Point]:
    """The last evaluation of every seed."""
    here = (study, method, batch)
    return {row.seed: row for row in points if (row.study, row.method, row.batch) == here and row.step == row.steps}


def _ends(rows: Sequence[Noisy]) -> list[str]:
    """The first and the last of the blocks that are numbered."""
    numbered = [block for block in dict.fromkeys(row.block for row in rows) if block.rpartition(".")[2].isdigit()]
    return [numbered[0], numbered[-1]] if numbered else []


def _whole(rows: Sequence[Noisy]) -> float:
    """The noise of the whole gradient by SGD's, mean over the moments that were measured."""
    moments = dict.fromkeys((row.seed, row.step) for row in rows)
    return statistics.mean(
        sum(row.noise for row in rows if (row.seed, row.step, row.operation) == (*moment, "all"))
        / sum(row.sgd for row in rows if (row.seed, row.step, row.operation) == (*moment, "all"))
        for moment in moments
    )


def _ratio(rows: Sequence[Noisy]) -> str:
    sgd = sum(row.sgd for row in rows)
    return f"{sum(row.noise for row in rows) / sgd:.2g}" if sgd else ""


def _mean(values: Sequence[float], digits: int, *, sign: bool = False) -> str:
    if not values:
        return ""
    form = f"{'+' if sign else ''}.{digits}f"
    text = format(statistics.mean(values), form).replace("-", "−")
    if len(values) < 2:
        return text
    return f"{text} ± {statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}"


_SCRATCH = (
    "A LLaMA of 4 layers, 256 wide, with a byte-level vocabulary of 4,096 trained beside it, 3,000 steps of 8 × 128 "
    "tokens of the glosses of WordNet; and a vision transformer of 4 layers, 128 wide, 1,500 steps of 64 of the "
    "handwritten digits that scikit-learn carries. Mean ± standard error over seeds after the last step; the "
    "difference to the exact run of the same seed, which sees the same rows in the same order. The score is the share"
    " of next tokens, and of images that are wrong:"
)
_NOISE = (
    "The default's D² by D²_SGD of the first and the last block, on the batch of that step, all operations and each "
    "one alone, mean over seeds (Σ D² by Σ D²_SGD):"
)
_PREDICTED = (
    "`effective_batch` says which batch has as much noise without stand-ins. Found is the batch with which exact "
    "training, with the same number of steps and the same learning rate, has the same training loss at the end:"
)
_PICTURE = "![Held-out loss, mean over seeds, with bands over them](../benchmarks/results/frontier-curves.png)"
