"""Row sampling with every norm estimator, compared with CountSketch, on GLUE.

MiniLM as RoBERTa is fine-tuned for 25 exact steps on a GLUE task, and the norm estimators learn from them. Then
D²_sketch / D²_SGD (samples are sequences) is computed in closed form for all encoder linears on the next batch, with
the probabilities that the layers would sample rows by; K = N/10 rows in the input's own dtype. Padding is left out.

The two caches have seen the next batch once before, halfway, as in an epoch before; to the others it is new.
"oracle" knows every ‖yᵢ‖ of the batch, which nobody does in a forward pass.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import library
from benchmarks.noise.glue import add_glue, load_glue, padding_of, spread
from benchmarks.records import RATIO, RESULTS, Sampled, origin, write_rows
from rmm_linear.estimators import LayerCall, NormEstimator, make_norm_estimator, norm_estimators
from rmm_linear.variance import sgd_variance, sketch_variance

ORACLE = "oracle"
_CACHES = ("sample_cache", "sequence_cache")


class _Oracle(NormEstimator):
    """Knows ‖yᵢ‖ of the batch that it was shown last."""

    def __init__(self) -> None:
        self._norms: Tensor | None = None

    def predict(self, call: LayerCall) -> Tensor | None:
        return self._norms

    def observe(self, call: LayerCall, norms: Tensor) -> None:
        self._norms = norms


class Watchers:
    def __init__(self, name: str) -> None:
        self.make: Callable[[], NormEstimator | None] = _Oracle if name == ORACLE else lambda: make_norm_estimator(name)
        self.context = library.ModelContext()

    def observe(
        self, records: Sequence[library.LayerRecord], batch: Mapping[str, Tensor], index: Tensor | None
    ) -> None:
        """Show the layers on one step, its batch, and the examples' numbers if they are known."""
        for number, record in enumerate(records):
            estimator = self.context.estimators.get(number) or self.make()
            if estimator is not None:
                self.context.estimators[number] = estimator
                estimator.observe(_call(record, batch, index), library.row_norms(record.grad_output).float())

    def expected(
        self, number: int, records: Sequence[library.LayerRecord], batch: Mapping[str, Tensor], index: Tensor
    ) -> Tensor | None:
        """Return ŷ, (N,), of ``records[number]`` and of those that share its input; None where nothing is known."""
        places: dict[int, list[int]] = {}
        for place, record in enumerate(records):
            places.setdefault(record.x.data_ptr(), []).append(place)
        self.context.sketch_cache.groups = {tuple(group) for group in places.values()}
        return self.context.expected(number, _call(records[number], batch, index))


def _call(record: library.LayerRecord, batch: Mapping[str, Tensor], index: Tensor | None) -> LayerCall:
    mask = None if record.mask is None else library.TokenMask.of(record.mask)
    return LayerCall(record.samples or (len(record.x),), record.x.device, batch["input_ids"].reshape(-1), index, mask)


def measure(
    model: nn.Module, batches: Sequence[Mapping[str, Any]], *, uniform_mix: float = 0.1, learning_rate: float = 1e-4
) -> dict[tuple[str, str], list[float]]:
    """Train on all batches but the last one, and compute the noise of every kind and estimator on that."""
    *steps, last = batches
    watchers = {name: Watchers(name) for name in (*norm_estimators(), ORACLE)}
    numbers = torch.arange(len(last["input_ids"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)

    def look(batch: Mapping[str, Any]) -> list[library.LayerRecord]:
        optimizer.zero_grad()
        return [record for record in library.record_layers(model, batch) if record.samples is not None]

    for step, batch in enumerate(steps):
        if step == len(steps) // 2:
            records = look(last)
            for name in _CACHES:
                watchers[name].observe(records, last, numbers)
        records = look(batch)
        for name, watcher in watchers.items():
            if name not in _CACHES:
                watcher.observe(records, batch, None)
        optimizer.step()
    records = look(last)
    watchers[ORACLE].observe(records, last, None)
    found: dict[tuple[str, str], list[float]] = {}
    for number, record in enumerate(records):
        x, y, mask = record.x, record.grad_output, record.mask
        sgd = sgd_variance(x, y, samples=record.samples)
        rows = library.RMMConfig(ratio=RATIO).spec(*x.shape, itemsize=2)
        shape = {"rows": len(x) if rows is None else rows.rows, "mask": mask}
        for kind in ("rows", "countsketch"):
            found.setdefault((kind, ""), []).append(float(sketch_variance(x, y, kind=kind, **shape) / sgd))
        ranks = None if mask is None else library.TokenMask.of(mask)
        for name, watcher in watchers.items():
            expected = watcher.expected(number, records, last, numbers)
            p = library.probabilities(library.row_norms(x), uniform_mix, expected, ranks)
            for kind in library.SAMPLERS:
                noise = sketch_variance(x, y, kind=kind, probabilities=p, **shape) / sgd
                found.setdefault((kind, name), []).append(float(noise))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_glue(parser, ("cola", "sst2"), batch=64)
    parser.add_argument("--steps", type=int, default=25, help="exact training steps before")
    parser.add_argument("--uniform_mix", type=float, default=0.1, help="part of p that all tokens share alike")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of everything")
    parser.add_argument("--csv", type=Path, default=RESULTS / "sampling.csv", help="file to write")


def run(arguments: argparse.Namespace) -> Iterator[str]:
    about = {**origin("cpu"), "seed": " ".join(map(str, arguments.seeds))}
    how = {"batch": arguments.batch, "steps": arguments.steps, "max_length": 128}
    rows: list[Sampled] = []
    for task in arguments.tasks:
        runs, padding = [], []
        for seed in arguments.seeds:
            model, batches = load_glue(task, arguments.data_dir, **how, seed=seed)
            runs.append(measure(model, batches, uniform_mix=arguments.uniform_mix))
            padding.append(padding_of(batches[-1]))
        for (kind, name), layers in runs[0].items():
            found = spread([median(one[kind, name]) for one in runs])
            shape = {"layers": len(layers), "padding": mean(padding)}
            row = Sampled(task=task, kind=kind, norm_estimator=name, **found, **shape, **about)
            rows.append(row)
            yield f"{task:6} {kind:12} {name:15} {row.noise:7.3f}  ({row.least:.3f} to {row.most:.3f})"
    write_rows(arguments.csv, rows)
