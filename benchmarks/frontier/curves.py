"""Curves of models that are trained from scratch, with the noise of their gradients on the way."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.frontier.adapters import has_variants, variant_noise
from benchmarks.frontier.methods import EXACT, METHODS
from benchmarks.frontier.rows import Noisy, Point
from benchmarks.frontier.runs import Asked, go_on, put_run
from benchmarks.frontier.study import BASE, Study, adapters, base, convolutions, experts, images, language
from benchmarks.library import converted_modules
from benchmarks.records import known_rows
from rmm_linear.variance import gradient_noise

Run = tuple[str, str, int, int]
# Exact runs with smaller batches, by which the noise of methods is judged; only where a step sees rows for the first
# time is a smaller batch nothing but noisier.
SMALLER = {"language": (7, 6, 4, 2, 1)}
_MEASURED = (0.02, 0.1, 0.5, 1.0)  # shares of the steps, after which the noise is measured
_WARM_UP, _LEAST = 0.05, 0.1
_DRAWS = 2


def make(study: str, asked: Asked) -> Study:
    if study == "adapters":
        return adapters(asked.wordnet, weights_of(asked), tiny=asked.tiny)
    if study in ("images", "convolutions"):
        return {"images": images, "convolutions": convolutions}[study](tiny=asked.tiny)
    return {"language": language, "experts": experts, BASE: base}[study](asked.wordnet, tiny=asked.tiny)


def weights_of(asked: Asked) -> Path:
    """Where the study of the base leaves its model."""
    return Path(asked.base_dir) / ("tiny.safetensors" if asked.tiny else "base.safetensors")


def curve(name: str, method: str, seed: int, batch: int, asked: Asked) -> tuple[list[Point], list[Noisy]]:
    """Train a model from scratch, and measure the noise of compressed activations on the way."""
    study, how = make(name, asked), METHODS[method]
    bare = study.model(seed)
    model = how.prepare(bare).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=study.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
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
                    seconds=0.0, learning_rate=study.learning_rate, settings=_settings(name, method, asked),
                )
            )  # fmt: skip
            losses.clear()
    seconds = time.perf_counter() - begin
    if name == BASE:
        weights_of(asked).parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), weights_of(asked))
    return [dataclasses.replace(point, seconds=seconds) for point in points], noises


def _settings(study: str, method: str, asked: Asked) -> str:
    """Write what a run is trained with; of adapters, with the model that they have."""
    written = METHODS[method].settings()
    if study != "adapters":
        return written
    return f"{written} of {hashlib.sha256(weights_of(asked).read_bytes()).hexdigest()[:12]}"


def _rate(done: float) -> float:
    """Warm-up, then half a cosine."""
    if done < _WARM_UP:
        return (done + 1e-3) / _WARM_UP
    return _LEAST + (1 - _LEAST) * (1 + math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP))) / 2


def _noise(model: nn.Module, rows: dict[str, Any], here: dict[str, Any]) -> list[Noisy]:
    if converted_modules(model):
        found = gradient_noise(model, rows, draws=_DRAWS)
        totals = {operation: found.totals(operation) for operation in found.stand_ins}
    else:
        totals = {"all": variant_noise(model, rows, _DRAWS)} if has_variants(model) else {}
    return [
        Noisy(**here, operation=operation, block=block, noise=noise, sgd=sgd)
        for operation, blocks in totals.items()
        for block, (noise, sgd) in blocks.items()
    ]


def curves(asked: Asked, about: dict[str, Any]) -> Iterator[str]:
    """Run what is not there yet, or was run with other settings; the files are whole after every run.

    Adapters come after their base, which is trained once, with seed 0.
    """
    if "adapters" in asked.studies:
        yield from _runs(dataclasses.replace(asked, studies=(BASE,), methods=(EXACT,), seeds=(0,)), about)
        if not weights_of(asked).is_file():
            yield "adapters wait for their base: the same command goes on"
            asked = dataclasses.replace(asked, studies=[name for name in asked.studies if name != "adapters"])
    yield from _runs(asked, about)


def _runs(asked: Asked, about: dict[str, Any]) -> Iterator[str]:
    path, noise_path = asked.out / "frontier-curves.csv", asked.out / "frontier-noise.csv"
    there = {_key(row): row for row in known_rows(path, Point)}
    made = {name: make(name, asked) for name in asked.studies}
    every = [
        (name, method, seed, batch)
        for seed in asked.seeds
        for name, study in made.items()
        for method in study.methods
        for batch in (study.batch, *(SMALLER.get(name, ()) if method == EXACT else ()))
        if method in asked.methods
    ]

    def is_as_wanted(row: Point) -> bool:
        now = (made[row.study].steps, made[row.study].learning_rate, _settings(row.study, row.method, asked))
        is_lost = row.study == BASE and not weights_of(asked).is_file()
        return now == (row.steps, row.learning_rate, row.settings) and not is_lost

    def keep(run: Run, found: tuple[list[Point], list[Noisy]]) -> str:
        # First the noise: of a run that is interrupted between the two files, its rows are replaced.
        for place, rows in ((noise_path, found[1]), (path, found[0])):
            if rows:
                put_run(place, rows, about, asked.jobs, _key)
        last = found[0][-1]
        return f"{last.metric} {last.score:.4f} ({last.seconds:.0f} s)"

    pending = [run for run in every if run not in there or not is_as_wanted(there[run])]
    done = len(every) - len(pending)
    yield from go_on(asked, len(every), done, pending, lambda run: (curve, *run, asked), keep)


def _key(row: Point | Noisy) -> Run:
    return row.study, row.method, row.seed, row.batch
