"""Tables of the models that are trained from scratch: what they reach, and the noise on the way."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.frontier.means import mean_text
from benchmarks.frontier.methods import EXACT, METHODS
from benchmarks.frontier.predictions import BATCHES, TITLES, prediction_sections
from benchmarks.frontier.rows import Noisy, Point
from rmm_linear._support.tables import table


def curve_sections(points: Sequence[Point], noises: Sequence[Noisy]) -> list[str]:
    """Make the sections.

    Args:
        points: All evaluations.
        noises: All measurements.

    Returns:
        Their parts; none if nothing was measured.
    """
    parts = list[str]()
    if points:
        models = "; ".join(text for study, text in _MODELS.items() if any(row.study == study for row in points))
        parts += ["### From scratch", _SCRATCH.format(models), reached(points), _PICTURE]
    if noises:
        parts += ["### Noise through training", _NOISE, through_training(noises)]
    return [*parts, *prediction_sections(points, noises)]


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
                TITLES[study],
                METHODS[method].title,
                mean_text([row.train_loss for row in last.values()], 4),
                mean_text([row.dev_loss for row in last.values()], 4),
                "" if method == EXACT else mean_text(apart, 4, sign=True),
                *(
                    mean_text([100 * row.score for row in last.values()], 2) if study == name else ""
                    for name in ("language", "images")
                ),
                str(len(last)),
            )
        )
    names = (
        "study",
        "method",
        "training loss",
        "held-out loss",
        "by exact's",
        "tokens right, %",
        "images wrong, %",
        "seeds",
    )
    return table(names, sorted(lines, key=lambda line: list(TITLES.values()).index(line[0])))


def through_training(noises: Sequence[Noisy]) -> str:
    """Make the table of noise by operation and depth.

    Args:
        noises: All measurements.

    Returns:
        A line per study, operation and block, and the minibatch's own variance of every block; beside the blocks that
        are numbered, the whole gradient.
    """
    lines, moments = list[tuple[str, ...]](), list[list[str]]()
    for study in (name for name in TITLES if any(row.study == name for row in noises)):
        here = [row for row in noises if row.study == study and row.method == "tenth"]
        steps, blocks = sorted({row.step for row in here}), _numbered(here)
        moments.append([str(step) for step in steps])
        for operation in dict.fromkeys(row.operation for row in here):
            some = blocks if operation == "all" else [*dict.fromkeys([*blocks[:1], *blocks[-1:]])]
            for block in (*some, _WHOLE):
                chosen = [row for row in here if row.operation == operation and block in (row.block, _WHOLE)]
                cells = [_ratio([row for row in chosen if row.step == step]) for step in steps]
                lines.append((TITLES[study], operation, block, *cells))
        for block in (*blocks, _WHOLE):
            chosen = [row for row in here if row.operation == "all" and block in (row.block, _WHOLE)]
            found = [_by_seed([row for row in chosen if row.step == step]) for step in steps]
            middle = [statistics.median(sgd for _, sgd in sums) if sums else None for sums in found]
            lines.append((TITLES[study], "D²_SGD", block, *("" if sgd is None else f"{sgd:.2g}" for sgd in middle)))
    width = max((len(one) for one in moments), default=0)
    names = [" / ".join(dict.fromkeys(one[place] for one in moments if place < len(one))) for place in range(width)]
    return table(["study", "operation", "block", *(f"step {name}" for name in names)], lines)


def _last(points: Sequence[Point], study: str, method: str, batch: int) -> dict[int, Point]:
    """The last evaluation of every seed."""
    here = (study, method, batch)
    return {row.seed: row for row in points if (row.study, row.method, row.batch) == here and row.step == row.steps}


def _numbered(rows: Sequence[Noisy]) -> list[str]:
    """The blocks that are numbered, in the model's order."""
    return [block for block in dict.fromkeys(row.block for row in rows) if block.rpartition(".")[2].isdigit()]


def _ratio(rows: Sequence[Noisy]) -> str:
    """The median over seeds, and where they differ by more than half of it, the least and the most."""
    ratios = sorted(noise / sgd for noise, sgd in _by_seed(rows) if sgd)
    if not ratios:
        return ""
    middle = statistics.median(ratios)
    far = ratios[-1] - ratios[0] > middle / 2
    return f"{middle:.2g}" + (f" ({ratios[0]:.2g} to {ratios[-1]:.2g})" if far else "")


def _by_seed(rows: Sequence[Noisy]) -> list[tuple[float, float]]:
    """Sums over blocks of the noise and of SGD's, of every seed."""
    found: dict[int, tuple[float, float]] = {}
    for row in rows:
        noise, sgd = found.get(row.seed, (0.0, 0.0))
        found[row.seed] = noise + row.noise, sgd + row.sgd
    return list(found.values())


_MODELS = {
    "language": "a LLaMA of 4 layers, 256 wide, with a byte-level vocabulary of 4,096 trained beside it, on 3,000 "
    "steps of 8 × 64 tokens of the glosses of WordNet, none of them seen twice",
    "images": "a vision transformer of 4 layers, 128 wide, on 1,500 steps of 64 of the handwritten digits that "
    "scikit-learn carries",
}
_SCRATCH = (
    "Trained from scratch: {}. Mean ± standard error over seeds after the last step, of the training loss over the "
    "batches since the evaluation before; the difference is that of the held-out loss to the exact run of the same "
    "seed, which sees the same rows in the same order. What methods are is on [another page](comparison.md#figures); "
    "*Gaussian sketch by our layers* is the published sketch with our random numbers, whose noise can be measured:"
)
_NOISE = (
    "The default's D² by D²_SGD in every layer of the transformer and in the whole gradient, embeddings, last norm and "
    "head among it, on the batch of that step: of all operations, of each one alone in the first layer, the last one "
    "and the whole, and beside them D²_SGD itself; stand-ins are drawn twice. Medians over seeds; where these "
    "are more than half of the median apart, from the least to the most as well. Once all of a training set is fitted, "
    "D²_SGD is next to nothing, and a ratio to it says little:"
)
_WHOLE = "whole gradient"
_PICTURE = "![Held-out loss, mean over seeds, bands from least to most](../benchmarks/results/frontier-curves.png)"
