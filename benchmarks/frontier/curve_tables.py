"""Tables of the models that are trained from scratch: what they reach, and whether their noise predicts anything."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.frontier.means import mean_text
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
    if predicted := predictions(points, noises):
        parts += ["### Does the noise predict anything?", _PREDICTED, predicted]
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
                mean_text([row.train_loss for row in last.values()], 4),
                mean_text([row.dev_loss for row in last.values()], 4),
                "" if method == EXACT else mean_text(apart, 4, sign=True),
                mean_text([100 * row.score for row in last.values()], 2),
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
        A line per study, operation and block, and the minibatch's own variance of every block.
    """
    lines, moments = list[tuple[str, ...]](), list[list[str]]()
    for study in (name for name in _TITLES if any(row.study == name for row in noises)):
        here = [row for row in noises if row.study == study and row.method == "tenth"]
        steps, blocks = sorted({row.step for row in here}), _numbered(here)
        moments.append([str(step) for step in steps])
        for operation in dict.fromkeys(row.operation for row in here):
            for block in blocks if operation == "all" else [*dict.fromkeys([*blocks[:1], *blocks[-1:]])]:
                chosen = [row for row in here if (row.operation, row.block) == (operation, block)]
                cells = [_ratio([row for row in chosen if row.step == step]) for step in steps]
                lines.append((_TITLES[study], operation, block, *cells))
        for block in blocks:
            chosen = [row for row in here if (row.operation, row.block) == ("all", block)]
            means = [statistics.mean(row.sgd for row in chosen if row.step == step) for step in steps]
            lines.append((_TITLES[study], "D²_SGD", block, *(f"{mean:.2g}" for mean in means)))
    width = max((len(one) for one in moments), default=0)
    names = [" / ".join(dict.fromkeys(one[place] for one in moments if place < len(one))) for place in range(width)]
    return table(["study", "operation", "block", *(f"step {name}" for name in names)], lines)


def predictions(points: Sequence[Point], noises: Sequence[Noisy]) -> str:
    """Compare the batch that noise predicts with the batch of exact training that comes as far.

    Args:
        points: All evaluations.
        noises: All measurements.

    Returns:
        A line per study and noisy method; none for studies whose smaller batches were not run, and no table if
        there is no line.
    """
    lines = list[tuple[str, ...]]()
    for study, batch in BATCHES.items():
        here = [row for row in points if row.study == study]
        step = max((row.step for row in here if row.batch == batch and row.epoch <= 1), default=0)
        sizes = sorted({row.batch for row in here if row.method == EXACT})
        exact = {size: _losses(here, EXACT, size, step) for size in sizes}
        exact = {size: losses for size, losses in exact.items() if losses}
        for method in dict.fromkeys(row.method for row in noises if row.study == study):
            losses = _losses(here, method, batch, step)
            known = [row for row in noises if (row.study, row.method) == (study, method) and row.step <= step]
            ratios = [statistics.mean(found) for found in (_whole(known), _middle(known)) if found]
            if len(exact) < 2 or not losses or len(ratios) < 2:
                continue
            of_seed = {seed: {size: each[seed] for size, each in exact.items() if seed in each} for seed in losses}
            found = [_batch_of(loss, of_seed[seed]) for seed, loss in sorted(losses.items()) if len(of_seed[seed]) > 1]
            lines.append(
                (
                    _TITLES[study],
                    METHODS[method].title,
                    str(step),
                    " / ".join(f"{ratio:.2g}" for ratio in ratios),
                    " / ".join(f"{effective_batch(batch, ratio):.1f}" for ratio in ratios),
                    ", ".join(found),
                    mean_text([*losses.values()], 4),
                    *(mean_text([*each.values()], 4) for each in exact.values()),
                )
            )
    if not lines:
        return ""
    sizes = sorted({row.batch for row in points if row.method == EXACT and row.study == "language"})
    names = ("study", "method", "step", "noise", "batch predicted", "batch found", "loss")
    return table((*names, *(f"exact, {size}" for size in sizes)), lines)


def _losses(rows: Sequence[Point], method: str, batch: int, step: int) -> dict[int, float]:
    """The held-out loss of every seed after a step."""
    return {row.seed: row.dev_loss for row in rows if (row.method, row.batch, row.step) == (method, batch, step)}


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


def _numbered(rows: Sequence[Noisy]) -> list[str]:
    """The blocks that are numbered, in the model's order."""
    return [block for block in dict.fromkeys(row.block for row in rows) if block.rpartition(".")[2].isdigit()]


def _whole(rows: Sequence[Noisy]) -> list[float]:
    """The noise of the whole gradient by SGD's, at every moment of every seed."""
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for row in (row for row in rows if row.operation == "all"):
        noise, sgd = found.get((row.seed, row.step), (0.0, 0.0))
        found[row.seed, row.step] = noise + row.noise, sgd + row.sgd
    return [noise / sgd for noise, sgd in found.values() if sgd]


def _middle(rows: Sequence[Noisy]) -> list[float]:
    """The median over blocks of the noise by SGD's, at every moment of every seed."""
    found: dict[tuple[int, int], list[float]] = {}
    for row in (row for row in rows if row.operation == "all" and row.sgd):
        found.setdefault((row.seed, row.step), []).append(row.noise / row.sgd)
    return [statistics.median(each) for each in found.values()]


def _ratio(rows: Sequence[Noisy]) -> str:
    sgd = sum(row.sgd for row in rows)
    return f"{sum(row.noise for row in rows) / sgd:.2g}" if sgd else ""


_SCRATCH = (
    "A LLaMA of 4 layers, 256 wide, with a byte-level vocabulary of 4,096 trained beside it, 3,000 steps of 8 × 128 "
    "tokens of the glosses of WordNet; and a vision transformer of 4 layers, 128 wide, 1,500 steps of 64 of the "
    "handwritten digits that scikit-learn carries. Mean ± standard error over seeds after the last step; the "
    "difference is that to the exact run of the same seed, which sees the same rows in the same order. The score is "
    "the share of next tokens that are right, and that of images that are wrong:"
)
_NOISE = (
    "The default's D² by D²_SGD in every block, on the batch of that step: of all operations, of each one alone in "
    "the first and the last block, and beside them D²_SGD itself; over seeds, Σ D² by Σ D²_SGD:"
)
_PREDICTED = (
    "`effective_batch` says which batch has as much noise without stand-ins. It is compared with exact training in "
    "smaller batches, by the held-out loss after as many steps, with the same learning rate: at the last evaluation "
    "before the first row comes again, up to which the noise is averaged too: that of the whole gradient, and of the "
    "median block. Found is, for every seed, the batch whose exact loss of the same seed it is, between those that "
    "were run on a logarithmic scale; losses are mean ± standard error over seeds. AdamW divides by what it has seen "
    "of each coordinate's size, so no one ratio need be the right one:"
)
_PICTURE = "![Held-out loss, mean over seeds, with bands over them](../benchmarks/results/frontier-curves.png)"
