"""Row sampling with every norm estimator beside CountSketch, on GLUE: ``python -m benchmarks.sampling --help``.

MiniLM as RoBERTa is fine-tuned for 25 exact steps on a GLUE task, and the norm estimators learn from them. Then
D²_sketch / D²_SGD (samples are sequences) is computed in closed form for all encoder linears on the next batch, with
the probabilities that the layers would sample rows by; K = N/10 rows in the input's own dtype. Padding is left out.

The two caches have seen the next batch once before, halfway, as in an epoch before; to the others it is new.
"oracle" knows every ‖yᵢ‖ of the batch, which nobody does in a forward pass.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.noise import load_glue, spread
from benchmarks.pages import fill
from benchmarks.records import RATIO, RESULTS, Sampled, origin, write_rows
from rmm_linear.config import RMMConfig
from rmm_linear.context.model_context import ModelContext
from rmm_linear.estimators import LayerCall, NormEstimator, make_norm_estimator, norm_estimators
from rmm_linear.sketches import SAMPLERS, TokenMask, probabilities
from rmm_linear.sketches.sampling import row_norms
from rmm_linear.variance import sgd_variance, sketch_variance
from rmm_linear.variance.survey.records import LayerRecord, record_layers

CSV = RESULTS / "sampling.csv"
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
    """The estimators of one name for all layers, fed with recorded gradients as layers feed them."""

    def __init__(self, name: str) -> None:
        """Make estimators of this name as layers need them."""
        self.make: Callable[[], NormEstimator | None] = _Oracle if name == ORACLE else lambda: make_norm_estimator(name)
        self.context = ModelContext()

    def observe(self, records: Sequence[LayerRecord], batch: Mapping[str, Tensor], index: Tensor | None) -> None:
        """Show the layers on one step, its batch, and the examples' numbers if they are known."""
        for number, record in enumerate(records):
            estimator = self.context.estimators.get(number) or self.make()
            if estimator is not None:
                self.context.estimators[number] = estimator
                estimator.observe(_call(record, batch, index), row_norms(record.grad_output).float())

    def expected(
        self, number: int, records: Sequence[LayerRecord], batch: Mapping[str, Tensor], index: Tensor
    ) -> Tensor | None:
        """Return ŷ, (N,), of ``records[number]`` and of those that share its input; None where nothing is known."""
        places: dict[int, list[int]] = {}
        for place, record in enumerate(records):
            places.setdefault(record.x.data_ptr(), []).append(place)
        self.context.sketch_cache.groups = {tuple(group) for group in places.values()}
        return self.context.expected(number, _call(records[number], batch, index))


def _call(record: LayerRecord, batch: Mapping[str, Tensor], index: Tensor | None) -> LayerCall:
    mask = None if record.mask is None else TokenMask.of(record.mask)
    return LayerCall(record.samples or (len(record.x),), record.x.device, batch["input_ids"].reshape(-1), index, mask)


def measure(
    model: nn.Module, batches: Sequence[Mapping[str, Any]], *, uniform_mix: float = 0.1, learning_rate: float = 1e-4
) -> dict[tuple[str, str], list[float]]:
    """Train on all batches but the last one, and compute the noise of every kind and estimator on that.

    Args:
        model: The model, see :func:`benchmarks.noise.load_glue`. Its weights change.
        batches: Training batches.
        uniform_mix: Part of the probability that all tokens share alike.
        learning_rate: Of AdamW.

    Returns:
        Kind and estimator to D²_sketch / D²_SGD of every layer that sees tokens.
    """
    *steps, last = batches
    watchers = {name: Watchers(name) for name in (*norm_estimators(), ORACLE)}
    numbers = torch.arange(len(last["input_ids"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)

    def look(batch: Mapping[str, Any]) -> list[LayerRecord]:
        optimizer.zero_grad()
        return [record for record in record_layers(model, batch) if record.samples is not None]

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
        rows = RMMConfig(ratio=RATIO).spec(*x.shape, itemsize=2)
        shape = {"rows": len(x) if rows is None else rows.rows, "mask": mask}
        for kind in ("rows", "countsketch"):
            found.setdefault((kind, ""), []).append(float(sketch_variance(x, y, kind=kind, **shape) / sgd))
        ranks = None if mask is None else TokenMask.of(mask)
        for name, watcher in watchers.items():
            expected = watcher.expected(number, records, last, numbers)
            p = probabilities(row_norms(x), uniform_mix, expected, ranks)
            for kind in SAMPLERS:
                noise = sketch_variance(x, y, kind=kind, probabilities=p, **shape) / sgd
                found.setdefault((kind, name), []).append(float(noise))
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command; ``argv`` are its arguments, None takes those of the process. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--data_dir", type=Path, required=True, help="folder with the official GLUE files")
    parser.add_argument("--tasks", nargs="+", default=["cola", "sst2"], help="GLUE tasks")
    parser.add_argument("--batch", type=int, default=64, help="sentences per batch")
    parser.add_argument("--steps", type=int, default=25, help="exact training steps before")
    parser.add_argument("--uniform_mix", type=float, default=0.1, help="part of p that all tokens share alike")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of everything")
    parser.add_argument("--csv", type=Path, default=CSV, help="file to write; the table is made of the usual one")
    arguments = parser.parse_args(argv)
    about = {**origin("cpu"), "seed": " ".join(map(str, arguments.seeds))}
    rows: list[Sampled] = []
    for task in arguments.tasks:
        runs, padding = [], []
        for seed in arguments.seeds:
            model, batches = load_glue(
                task, arguments.data_dir, batch=arguments.batch, steps=arguments.steps, max_length=128, seed=seed
            )
            runs.append(measure(model, batches, uniform_mix=arguments.uniform_mix))
            padding.append(1 - float(batches[-1]["attention_mask"].double().mean()))
        for (kind, name), layers in runs[0].items():
            found = spread([median(run[kind, name]) for run in runs])
            shape = {"layers": len(layers), "padding": mean(padding)}
            row = Sampled(task=task, kind=kind, norm_estimator=name, **found, **shape, **about)
            rows.append(row)
            print(f"{task:6} {kind:12} {name:15} {row.noise:7.3f}  ({row.least:.3f} to {row.most:.3f})", flush=True)
    write_rows(arguments.csv, rows)
    if arguments.csv == CSV:
        fill.update()
    return 0


if __name__ == "__main__":
    sys.exit(main())
