"""Curves of models that are trained from scratch, with the noise of their gradients on the way."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.frontier.methods import EXACT, METHODS
from benchmarks.frontier.rows import Noisy, Point
from benchmarks.frontier.runs import Asked, go_on, put_run
from benchmarks.frontier.study import GLOSSES, Study, convolutions, images, language
from benchmarks.library import converted_modules
from benchmarks.records import known_rows
from rmm_linear.variance import gradient_noise

Run = tuple[str, str, int, int]
# Exact runs with smaller batches, by which the noise of methods is judged; only where a step sees rows for the first
# time is a smaller batch nothing but noisier.
SMALLER = {"images": (), "convolutions": (), "language": (7, 6, 4, 2, 1)}
_MEASURED = (0.02, 0.1, 0.5, 1.0)  # shares of the steps, after which the noise is measured
_WARM_UP, _LEAST = 0.05, 0.1


def make(study: str, glosses: str = GLOSSES, *, tiny: bool = False) -> Study:
    makers = {"images": images, "convolutions": convolutions}
    return makers[study](tiny=tiny) if study in makers else language(glosses, tiny=tiny)


def curve(name: str, method: str, seed: int, batch: int, glosses: str, tiny: bool) -> tuple[list[Point], list[Noisy]]:
    """Train a model from scratch, and measure the noise of compressed activations on the way."""
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


def curves(asked: Asked, about: dict[str, Any]) -> Iterator[str]:
    """Run what is not there yet, or was run with other settings; the files are whole after every run."""
    path, noise_path = asked.out / "frontier-curves.csv", asked.out / "frontier-noise.csv"
    there = {_key(row): row for row in known_rows(path, Point)}
    made = {name: make(name, asked.wordnet, tiny=asked.tiny) for name in asked.studies}
    every = [
        (name, method, seed, batch)
        for seed in asked.seeds
        for name, study in made.items()
        for method in study.methods
        for batch in (study.batch, *(SMALLER[name] if method == EXACT else ()))
        if method in asked.methods
    ]

    def is_as_wanted(row: Point) -> bool:
        now = (made[row.study].steps, made[row.study].learning_rate, METHODS[row.method].settings())
        return now == (row.steps, row.learning_rate, row.settings)

    def keep(run: Run, found: tuple[list[Point], list[Noisy]]) -> str:
        # First the noise: of a run that is interrupted between the two files, its rows are replaced.
        for place, rows in ((noise_path, found[1]), (path, found[0])):
            if rows:
                put_run(place, rows, about, asked.jobs, _key)
        last = found[0][-1]
        return f"{last.metric} {last.score:.4f} ({last.seconds:.0f} s)"

    pending = [run for run in every if run not in there or not is_as_wanted(there[run])]
    done = len(every) - len(pending)
    yield from go_on(asked, len(every), done, pending, lambda run: (curve, *run, asked.wordnet, asked.tiny), keep)


def _key(row: Point | Noisy) -> Run:
    return row.study, row.method, row.seed, row.batch
