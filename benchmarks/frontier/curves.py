"""Curves of models that are trained from scratch, with the noise of their gradients on the way."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.frontier.images import images
from benchmarks.frontier.language import GLOSSES, language
from benchmarks.frontier.methods import EXACT, METHODS
from benchmarks.frontier.rows import Noisy, Point
from benchmarks.frontier.runs import about_run, in_turn, last_line, what_is_left
from benchmarks.frontier.study import Study
from benchmarks.records import known_rows, put_rows
from rmm_linear.conversion.exact import converted_modules
from rmm_linear.variance import gradient_noise

Run = tuple[str, str, int, int]
STUDIES = ("images", "language")
# Exact runs with smaller batches, by which the noise of methods is judged; only where a step sees rows for the first
# time is a smaller batch nothing but noisier.
SMALLER = {"images": (), "language": (7, 6, 4, 2, 1)}
_MEASURED = (0.02, 0.1, 0.5, 1.0)  # shares of the steps, after which the noise is measured
_WARM_UP, _LEAST = 0.05, 0.1


def make(study: str, glosses: str = GLOSSES, *, tiny: bool = False) -> Study:
    """Read a study's data.

    Args:
        study: Of :data:`STUDIES`.
        glosses: Folder of WordNet.
        tiny: Whether all is small.

    Returns:
        The study.

    Raises:
        ValueError: If the data are missing.
    """
    return images(tiny=tiny) if study == "images" else language(glosses, tiny=tiny)


def curve(name: str, method: str, seed: int, batch: int, glosses: str, tiny: bool) -> tuple[list[Point], list[Noisy]]:
    """Train a model from scratch.

    Args:
        name: Of :data:`STUDIES`.
        method: Of :data:`benchmarks.frontier.methods.METHODS`.
        seed: Of all that is random; runs of one seed see the same rows in the same order.
        batch: Rows per step.
        glosses: Folder of WordNet.
        tiny: Whether all is small.

    Returns:
        Evaluations; and the noise of stand-ins, where the method has any.
    """
    study, how = make(name, glosses, tiny=tiny), METHODS[method]
    bare = study.model(seed)
    model = how.prepare(bare).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=study.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step / study.steps))
    torch.manual_seed(seed)
    begin, losses = time.perf_counter(), list[float]()
    points, noises = list[Point](), list[Noisy]()
    measured = {max(round(share * study.steps), 1) for share in _MEASURED}
    here: dict[str, Any] = {"study": name, "method": method, "seed": seed, "batch": batch}
    for step, rows in zip(range(1, study.steps + 1), study.batches(seed, batch), strict=False):
        if step in measured and not how.is_exact:
            noises += _noise(bare, rows, here | {"step": step})
        loss = model(**rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(float(loss.detach()))
        if step % study.every == 0:
            dev_loss, score = study.evaluate(model)
            points.append(
                Point(
                    **here, step=step, steps=study.steps, epoch=step * batch / study.rows,
                    train_loss=sum(losses) / len(losses), dev_loss=dev_loss, metric=study.metric, score=score,
                    seconds=0.0, learning_rate=study.learning_rate, settings=how.settings(),
                )
            )  # fmt: skip
            losses.clear()
    seconds = time.perf_counter() - begin
    return [dataclasses.replace(point, seconds=seconds) for point in points], noises


def _rate(done: float) -> float:
    """Warm-up, then half a cosine."""
    if done < _WARM_UP:
        return (done + 1e-3) / _WARM_UP
    return _LEAST + (1 - _LEAST) * (1 + math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP))) / 2


def _noise(model: nn.Module, rows: dict[str, Any], here: dict[str, Any]) -> list[Noisy]:
    if not converted_modules(model):
        return []
    found = gradient_noise(model, rows, draws=2)
    return [
        Noisy(**here, operation=operation, block=block, noise=noise, sgd=sgd)
        for operation in found.stand_ins
        for block, (noise, sgd) in found.totals(operation).items()
    ]


@dataclass(frozen=True)
class Curves:
    """What is to be run, and how.

    Attributes:
        studies: Of :data:`STUDIES`.
        methods: Those of the study are run.
        seeds: Of every method.
        out: Folder of the csv files.
        glosses: Folder of WordNet.
        jobs: Runs at a time.
        deadline: By ``time.monotonic``, after which no run begins; None has no end.
        tiny: Whether all is small.
    """

    studies: Sequence[str]
    methods: Sequence[str]
    seeds: Sequence[int]
    out: Path
    glosses: str = GLOSSES
    jobs: int = 1
    deadline: float | None = None
    tiny: bool = False


def curves(wanted: Curves, about: dict[str, Any]) -> Iterator[str]:
    """Run what is not there yet, or was run with other settings; the files are whole after every run.

    Args:
        wanted: What to run. Seeds are the outer loop.
        about: Where the rows come from.

    Yields:
        A line per run, and what is left.
    """
    path, beside = wanted.out / "frontier-curves.csv", wanted.out / "frontier-noise.csv"
    there = {_key(row): row for row in known_rows(path, Point)}
    made = {name: make(name, wanted.glosses, tiny=wanted.tiny) for name in wanted.studies}
    every = [
        (name, method, seed, batch)
        for seed in wanted.seeds
        for name, study in made.items()
        for method in study.methods
        for batch in (study.batch, *(SMALLER[name] if method == EXACT else ()))
        if method in wanted.methods
    ]
    pending = [run for run in every if run not in there or not _is_as_wanted(there[run], made[run[0]])]
    done = len(every) - len(pending)

    def arguments(run: Run) -> tuple[Any, ...]:
        return curve, *run, wanted.glosses, wanted.tiny

    failed = 0
    for run, result in in_turn(pending, arguments, wanted.jobs, wanted.deadline):
        title = ", ".join(map(str, run))
        if isinstance(result, BaseException):
            failed += 1
            yield f"{title} failed: {last_line(result)}"
            continue
        found, noisy = result
        here = about_run(about, wanted.jobs)
        # First the noise: of a run that is interrupted between the two files, its rows are replaced.
        for place, rows in ((beside, noisy), (path, found)):
            if rows:
                put_rows(
                    place, [dataclasses.replace(row, **here) for row in rows], lambda row, run=run: _key(row) == run
                )
        done += 1
        last = found[-1]
        yield f"[{done}/{len(every)}] {title}: {last.metric} {last.score:.4f} ({last.seconds:.0f} s)"
    yield what_is_left(done, len(every), failed)


def _key(row: Point | Noisy) -> Run:
    return row.study, row.method, row.seed, row.batch


def _is_as_wanted(row: Point, study: Study) -> bool:
    """Whether a run that is there was trained as it would be now."""
    now = (study.steps, study.learning_rate, METHODS[row.method].settings())
    return now == (row.steps, row.learning_rate, row.settings)
