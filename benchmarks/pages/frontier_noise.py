"""The tables of ``docs/training-noise.md``: long training, models trained from scratch, and what noise predicts."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.frontier.aggregate import mean_over_groups, mean_text, share_text, text_of
from benchmarks.frontier.methods import EXACT, METHODS, NUDGED, PARTS, TUNED
from benchmarks.frontier.rows import Cost, Epoch, Noisy, Point
from benchmarks.frontier.study import BASE, BATCHES, DRAWN, LONG, TITLES
from benchmarks.library import table
from benchmarks.pages.render import Cell, Table, columns, from_csv
from benchmarks.records import read_rows
from rmm_linear.variance import effective_batch

_SLOW, _RAISED = "cola-slow", "cola-raised"
_WHOLE = "whole gradient"
_ADAPTED, _WITHOUT = "adapters", "their base, without adapters"


def _by_epoch(task: str) -> Callable[[list[Epoch]], str]:
    """Make the table of a line per epoch; of methods but exact, differences to the exact run of the same seed."""

    def make(epochs: list[Epoch]) -> str:
        exact = {(row.seed, row.epoch): row for row in epochs if (row.task, row.method) == (task, EXACT)}
        here = [*exact.values(), *(row for row in epochs if row.task == task and row.method != EXACT)]

        def cell(method: str, field: str, digits: int, factor: float) -> Cell:
            def values(number: int) -> str:
                found = [row for row in here if (row.method, row.epoch) == (method, number)]
                if method != EXACT:
                    found = [row for row in found if (row.seed, number) in exact]
                bases = [0.0 if method == EXACT else getattr(exact[row.seed, number], field) or 0.0 for row in found]
                apart = [(getattr(row, field) or 0.0) - base for row, base in zip(found, bases, strict=True)]
                return mean_text(apart, digits, factor=factor, sign=method != EXACT)

            return values

        fields = {"batches": ("train_loss", 4, 1), "training set": ("fitted_loss", 4, 1), "score": ("score", 1, 100)}
        spec: dict[str, Cell] = {"epoch": str}
        for method in (method for method in TUNED if any(row.method == method for row in here)):
            for title, how in fields.items():
                spec[f"{METHODS[method].title}: {title}"] = cell(method, *how)
        return columns(sorted({row.epoch for row in here}), spec)

    return make


def _reached(points: Sequence[Point]) -> str:
    """Lay out what models reach, a line per study and method."""
    last: dict[tuple[str, str], dict[int, Point]] = {}
    for row in points:
        if row.study in DRAWN and row.step == row.steps and row.batch == BATCHES[row.study]:
            last.setdefault((row.study, row.method), {})[row.seed] = row

    def mean_of(value: Callable[[Point], float], digits: int, studies: Iterable[str] = TITLES) -> Cell:
        return lambda key: mean_text(list(map(value, last[key].values())), digits) if key[0] in studies else ""

    def difference(key: tuple[str, str]) -> str:
        exact = last.get((key[0], EXACT), {})
        apart = [row.dev_loss - exact[seed].dev_loss for seed, row in last[key].items() if seed in exact]
        return "" if key[1] == EXACT else mean_text(apart, 4, sign=True)

    spec: dict[str, Cell] = {
        "study": lambda key: TITLES[key[0]],
        "method": lambda key: METHODS[key[1]].title,
        "training loss": mean_of(lambda row: row.train_loss, 4),
        "held-out loss": mean_of(lambda row: row.dev_loss, 4),
        "difference to exact": difference,
        "tokens right, %": mean_of(lambda row: 100 * row.score, 2, ("language",)),
        "images wrong, %": mean_of(lambda row: 100 * row.score, 2, ("images", "convolutions")),
        "seeds": lambda key: str(len(last[key])),
    }
    return columns(sorted(last, key=lambda key: [*TITLES].index(key[0])), spec)


# What is trained: tasks of fine-tuning together, whose loss is that of training, or a study, whose loss is held out.
_SETTINGS: dict[str, tuple[str, ...]] = {
    "GLUE but STS-B, two epochs, float32": ("sst2", "cola", "rte"),
    "GLUE but STS-B, two epochs, bfloat16": ("sst2-bf16", "cola-bf16", "rte-bf16"),
    "CoLA, ten epochs at 1e-5": (_SLOW,),
    "CoLA, ten epochs at 1.1e-5": (_RAISED,),
    "CoLA, ten epochs at 1e-4": (LONG,),
    **{TITLES[study]: (study,) for study in (*DRAWN, "experts")},
}
# Student's t, the 97.5 % point by degrees of freedom.
_STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 8: 2.31, 10: 2.23, 15: 2.13, 30: 2.04}


def _told(results: Path) -> str:
    """Lay out by how much the losses of our qualities are above exact ones, and whether that can be told.

    Runs of other versions' settings are left out.
    """
    epochs, points = (
        read_rows(results / "frontier-accuracy.csv", Epoch),
        read_rows(results / "frontier-curves.csv", Point),
    )
    last = {(row.task, row.method, row.seed): (row.train_loss, row) for row in epochs if row.epoch == row.epochs}
    whole = (row for row in points if row.step == row.steps and row.batch == BATCHES[row.study])
    last |= {(row.study, row.method, row.seed): (row.dev_loss, row) for row in whole}
    lines = list[tuple[str, ...]]()
    for title, names in _SETTINGS.items():
        for method in (NUDGED, "careful", "tenth", *PARTS, "smallest"):
            groups = [
                [
                    (loss / last[name, EXACT, seed][0] - 1, row.score - last[name, EXACT, seed][1].score)
                    for (one, how, seed), (loss, row) in last.items()
                    if (one, how, row.settings) == (name, method, METHODS[method].settings())
                    and (name, EXACT, seed) in last
                ]
                for name in names
            ]
            if not all(groups):
                continue
            losses, scores = ([[pair[place] for pair in group] for group in groups] for place in (0, 1))
            loss = mean_over_groups(losses)
            seeds = min(map(len, groups))
            found = f"{text_of(loss, 2, factor=100, sign=True)} %", "?" if loss is None else _is_told(*loss, seeds - 1)
            score = "" if names[0] in TITLES else text_of(mean_over_groups(scores), 2, factor=100, sign=True)
            lines.append((title, METHODS[method].title, *found, score, str(seeds)))
    return table(("", "method", "loss", "told from 0", "score", "seeds"), lines)


def _is_told(mean: float, error: float, free: int) -> str:
    """Say whether the 95 % interval of a mean is all on one side of 0; "?" of one run."""
    if math.isnan(error) or not free:
        return "?"
    width = _STUDENT[max(one for one in _STUDENT if one <= free)]
    return "yes" if abs(mean) > width * error else "no"


def _of_study(study: str) -> Table:
    """Make the table of what the methods of a study take, reach and add; relative to the first of them.

    Adapters come after their base, as it is without them.
    """

    def make(results: Path) -> str:
        every, costs = read_rows(results / "frontier-curves.csv", Point), read_rows(results / "frontier-cost.csv", Cost)
        points = [row for row in every if row.study == study]
        noises = [row for row in read_rows(results / "frontier-noise.csv", Noisy) if row.study == study]
        taken = {row.method: row for row in costs if row.task == study}
        last = {(row.method, row.seed): row.dev_loss for row in points if row.step == row.steps}
        bases = [row.dev_loss for row in every if (row.study, row.step) == (BASE, row.steps) and study == _ADAPTED]
        last |= {(BASE, seed): loss for seed, loss in enumerate(bases)}
        first = next(iter(taken or dict.fromkeys(row.method for row in points)), "")

        def share(field: str) -> Cell:
            return lambda method: _share(taken, method, first, field)

        def losses(method: str) -> str:
            return mean_text([loss for (name, _), loss in last.items() if name == method], 4)

        def apart(method: str) -> str:
            found = [loss - last.get((first, seed), math.nan) for (name, seed), loss in last.items() if name == method]
            return "" if method in (first, BASE) else mean_text(found, 4, sign=True)

        def ratios(method: str) -> str:
            sums: dict[int, dict[int, tuple[float, float]]] = {}
            for row in (row for row in noises if (row.method, row.operation) == (method, "all")):
                noise, sgd = sums.setdefault(row.step, {}).get(row.seed, (0.0, 0.0))
                sums[row.step][row.seed] = noise + row.noise, sgd + row.sgd
            return " / ".join(_ratio([*seeds.values()]) for _, seeds in sorted(sums.items()))

        spec: dict[str, Cell] = {
            "method": lambda method: _WITHOUT if method == BASE else METHODS[method].title,
            "saved by autograd": share("saved"),
            "peak": share("peak"),
            "step time": share("time"),
            "held-out loss": losses,
            "difference": apart,
            "variance ratio": ratios,
            "seeds": lambda method: str(sum(name == method for name, _ in last)),
        }
        there = dict.fromkeys([*taken, *(row.method for row in points)])
        return columns([*([BASE] if bases else []), *there], spec)

    return make


def _share(taken: dict[str, Cost], method: str, first: str, field: str) -> str:
    if method not in taken or getattr(taken[method], field) is None:
        return ""
    return share_text(getattr(taken[method], field) / getattr(taken[first], field), field)


def _through_training(noises: Sequence[Noisy]) -> str:
    """Lay out a line per study, operation and block, and the minibatch's variance of every block.

    In addition to the blocks that are numbered, the whole gradient.
    """
    lines, moments = list[tuple[str, ...]](), list[list[str]]()
    for study in (name for name in DRAWN if any(row.study == name for row in noises)):
        here = [row for row in noises if row.study == study and row.method == "tenth"]
        steps = sorted({row.step for row in here})
        blocks = [block for block in dict.fromkeys(row.block for row in here) if block.rpartition(".")[2].isdigit()]
        moments.append([str(step) for step in steps])

        def sums(operation: str, block: str, step: int, here: Sequence[Noisy] = here) -> list[tuple[float, float]]:
            """Noise and the minibatch's variance over blocks, by seed."""
            found: dict[int, tuple[float, float]] = {}
            for row in here:
                if (row.operation, row.step) == (operation, step) and block in (row.block, _WHOLE):
                    noise, sgd = found.get(row.seed, (0.0, 0.0))
                    found[row.seed] = noise + row.noise, sgd + row.sgd
            return list(found.values())

        for operation in dict.fromkeys(row.operation for row in here):
            some = blocks if operation == "all" else [*dict.fromkeys([*blocks[:1], *blocks[-1:]])]
            for block in (*some, _WHOLE):
                cells = [_ratio(sums(operation, block, step)) for step in steps]
                if {*cells} - {"0", ""}:  # else nothing of the operation is compressed there
                    lines.append((TITLES[study], operation, block, *cells))
        for block in (*blocks, _WHOLE):
            found = [[sgd for _, sgd in sums("all", block, step)] for step in steps]
            cells = [f"{statistics.median(each):.2g}" if each else "" for each in found]
            lines.append((TITLES[study], "minibatch variance", block, *cells))
    names = [" / ".join(dict.fromkeys(each)) for each in itertools.zip_longest(*moments, fillvalue="")]
    return table(["study", "operation", "block", *(f"step {name}" for name in names)], lines)


def _ratio(sums: Sequence[tuple[float, float]]) -> str:
    """Write the median over seeds, and where they differ by more than half of it, the least and the most."""
    ratios = sorted(noise / sgd for noise, sgd in sums if sgd)
    middle = statistics.median(ratios) if ratios else 0.0
    far = bool(ratios) and ratios[-1] - ratios[0] > middle / 2
    return (f"{middle:.2g}" if ratios else "") + (f" ({ratios[0]:.2g} to {ratios[-1]:.2g})" if far else "")


@dataclass(frozen=True)
class _Prediction:
    """The batches that the noise of one run predicts, and the one that exact training finds.

    Noises are variance ratios, means over the moments before the losses are compared: of the whole gradient, and of the
    median block. The batch found is the one with which exact training of the same seed has the same loss, between those
    that were run on a logarithmic scale.
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
        return [effective_batch(BATCHES[self.study], noise) for noise in self.noises]


def predictions(points: Sequence[Point], noises: Sequence[Noisy]) -> Iterator[_Prediction]:
    """Compare the runs of noisy methods at the last evaluation before the first row comes again."""
    for study, method, seed in dict.fromkeys((row.study, row.method, row.seed) for row in noises):
        here = [row for row in points if (row.study, row.seed) == (study, seed)]
        step = max((row.step for row in here if row.batch == BATCHES[study] and row.epoch <= 1), default=0)
        exact = {row.batch: row.dev_loss for row in here if (row.method, row.step) == (EXACT, step)}
        run = (method, BATCHES[study], step)
        losses = [row.dev_loss for row in here if (row.method, row.batch, row.step) == run]
        known: dict[int, list[Noisy]] = {}
        for row in noises:
            if (row.study, row.method, row.seed, row.operation) == (study, method, seed, "all") and row.step <= step:
                known.setdefault(row.step, []).append(row)
        whole = [sum(row.noise for row in rows) / sgd for rows in known.values() if (sgd := sum(r.sgd for r in rows))]
        middle = [statistics.median(row.noise / row.sgd for row in rows if row.sgd) for rows in known.values()]
        if losses and len(exact) > 1 and whole and middle:
            batch, text = _batch_of(losses[0], exact)
            ratios = (statistics.mean(whole), statistics.mean(middle))
            yield _Prediction(study, method, step, ratios, batch, text, losses[0])


def _batch_of(loss: float, exact: dict[int, float]) -> tuple[float | None, str]:
    """Return the batch with which exact training has this loss."""
    sizes = sorted(exact)
    if loss <= exact[sizes[-1]]:
        return None, f"≥ {sizes[-1]}"
    for smaller, larger in itertools.pairwise(sizes):
        if exact[larger] <= loss <= exact[smaller]:
            part = (exact[smaller] - loss) / (exact[smaller] - exact[larger])
            batch = math.exp(math.log(smaller) + part * math.log(larger / smaller))
            return batch, f"{batch:.1f}"
    return None, f"< {sizes[0]}"


def _read(results: Path) -> tuple[list[Point], list[_Prediction]]:
    points = read_rows(results / "frontier-curves.csv", Point)
    return points, [*predictions(points, read_rows(results / "frontier-noise.csv", Noisy))]


def _predicted(results: Path) -> str:
    """Lay out predictions: pairs are of the whole gradient / of the median block, entries of a list of seeds."""
    runs: dict[tuple[str, str], list[_Prediction]] = {}
    for run in _read(results)[1]:
        runs.setdefault((run.study, run.method), []).append(run)

    def both(text: Callable[[Sequence[_Prediction], int], str]) -> Cell:
        return lambda seeds: " / ".join(text(seeds, place) for place in (0, 1))

    def by_found(seeds: Sequence[_Prediction], place: int) -> str:
        ratios = [run.predicted[place] / run.found for run in seeds if run.found is not None]
        return " to ".join(dict.fromkeys(f"{choose(ratios):.2g}" for choose in (min, max))) if ratios else "?"

    spec: dict[str, Cell] = {
        "study": lambda seeds: TITLES[seeds[0].study],
        "method": lambda seeds: METHODS[seeds[0].method].title,
        "variance ratio": both(lambda seeds, place: f"{statistics.median(run.noises[place] for run in seeds):.2g}"),
        "batch predicted, by seed": both(
            lambda seeds, place: ", ".join(f"{run.predicted[place]:.1f}" for run in seeds)
        ),
        "batch found": lambda seeds: ", ".join(run.found_text for run in seeds),
        "predicted / found": both(by_found),
        "loss": lambda seeds: mean_text([run.loss for run in seeds], 4),
    }
    return columns(runs.values(), spec)


def _exact_batches(results: Path) -> str:
    """Lay out the losses of exact training with which runs are compared."""
    points, runs = _read(results)
    steps = dict.fromkeys((run.study, run.step) for run in runs)
    here = [row for row in points if row.method == EXACT and (row.study, row.step) in steps]
    keys = sorted({(row.study, row.step, row.batch) for row in here})
    spec: dict[str, Cell] = {
        "study": lambda key: TITLES[key[0]],
        "step": lambda key: str(key[1]),
        "batch": lambda key: str(key[2]),
        "loss": lambda key: mean_text([r.dev_loss for r in here if (r.study, r.step, r.batch) == key], 4),
    }
    return columns(keys, spec)


TABLES: dict[str, Table] = {
    "frontier-long": from_csv("frontier-accuracy", Epoch, _by_epoch(LONG)),
    "frontier-slow": from_csv("frontier-accuracy", Epoch, _by_epoch(_SLOW)),
    "frontier-raised": from_csv("frontier-accuracy", Epoch, _by_epoch(_RAISED)),
    "frontier-curves": from_csv("frontier-curves", Point, _reached),
    "frontier-told": _told,
    "frontier-experts": _of_study("experts"),
    "frontier-adapters": _of_study(_ADAPTED),
    "frontier-noise": from_csv("frontier-noise", Noisy, _through_training),
    "frontier-predictions": _predicted,
    "frontier-exact": _exact_batches,
}
