"""Row sampling with every norm estimator beside CountSketch, on GLUE: ``python -m benchmarks.sampling --help``.

MiniLM as RoBERTa is fine-tuned for 25 exact steps on a GLUE task, and the norm estimators learn from them. Then
D²_sketch / D²_SGD (samples are sequences) is computed in closed form for all encoder linears on the next batch, with
the probabilities that the layers would draw rows by; K = N/10 rows in the input's own dtype. Padding is left out.

The two caches have seen the next batch once before, halfway, as in an epoch before; to the others it is new.
"oracle" knows every ‖yᵢ‖ of the batch, which nobody does in a forward pass.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.noise import load_glue
from benchmarks.readme import README, inserted
from benchmarks.records import RESULTS, environment
from rmm_linear._support.files import write_text
from rmm_linear.config import RMMConfig
from rmm_linear.context.model_context import ModelContext
from rmm_linear.estimators import LayerCall, NormEstimator, make_norm_estimator, norm_estimators
from rmm_linear.norm_estimators.registry import NONE
from rmm_linear.sketches import SAMPLERS, TokenMask, probabilities
from rmm_linear.sketches.sampling import row_norms
from rmm_linear.variance import sgd_variance, sketch_variance
from rmm_linear.variance.survey.records import LayerRecord, record_layers

CSV = RESULTS / "sampling.csv"
BEGIN = "<!-- python -m benchmarks.sampling: begin -->"
END = "<!-- python -m benchmarks.sampling: end -->"
ORACLE = "oracle"
RATIO = 0.1
_CACHES = ("sample_cache", "sequence_cache")


@dataclass(frozen=True)
class Noise:
    """One kind with one estimator on one task.

    Attributes:
        task: The GLUE task.
        kind: Kind of sketch.
        norm_estimator: Name of the estimator, "oracle", or empty where none applies.
        noise: Median over layers of D²_sketch / D²_SGD, mean over seeds.
        least: Least of the seeds.
        most: Most of the seeds.
        seeds: Number of seeds.
        layers: Layers.
        padding: Part of the tokens that is padding, mean over seeds.
    """

    task: str
    kind: str
    norm_estimator: str
    noise: float
    least: float
    most: float
    seeds: int
    layers: int
    padding: float


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
        """Make no estimator yet."""
        self.make: Callable[[], NormEstimator | None] = _Oracle if name == ORACLE else lambda: make_norm_estimator(name)
        self.scope = ModelContext()

    def observe(self, records: Sequence[LayerRecord], batch: Mapping[str, Tensor], index: Tensor | None) -> None:
        """Show a step.

        Args:
            records: The layers on that step.
            batch: Its batch.
            index: The examples' numbers, or None.
        """
        for number, record in enumerate(records):
            estimator = self.scope.estimators.get(number) or self.make()
            if estimator is not None:
                self.scope.estimators[number] = estimator
                estimator.observe(_call(record, batch, index), row_norms(record.grad_output).float())

    def expected(
        self, number: int, records: Sequence[LayerRecord], batch: Mapping[str, Tensor], index: Tensor
    ) -> Tensor | None:
        """Return ŷ of a layer and of those that share its input.

        Args:
            number: Of the layer, in ``records``.
            records: The layers.
            batch: The batch.
            index: The examples' numbers.

        Returns:
            Shape (N,), or None where nothing is known.
        """
        places: dict[int, list[int]] = {}
        for place, record in enumerate(records):
            places.setdefault(record.x.data_ptr(), []).append(place)
        self.scope.shared.groups = {tuple(group) for group in places.values()}
        return self.scope.expected(number, _call(records[number], batch, index))


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


def write_noises(path: Path, noises: Sequence[Noise], origin: Mapping[str, str | int]) -> None:
    """Write the csv file.

    Args:
        path: The file.
        noises: What was found.
        origin: More columns, the same for all rows.
    """
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, [*(field.name for field in fields(Noise)), *origin], lineterminator="\n")
    writer.writeheader()
    for noise in noises:
        row = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in asdict(noise).items()}
        writer.writerow({**row, **origin})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, buffer.getvalue())


def markdown(path: Path = CSV) -> str:
    """Return README's table.

    Args:
        path: The csv file.

    Returns:
        Markdown: settings down, tasks across.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    cells = {(row["kind"], row["norm_estimator"], row["task"]): f"{float(row['noise']):.2f}" for row in rows}
    settings = list(dict.fromkeys(row["norm_estimator"] for row in rows if row["norm_estimator"]))
    header = ["rows drawn by ‖x‖ and", *(f"{task}: {kind}" for task in tasks for kind in SAMPLERS)]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for name in settings:
        title = {NONE: '"none": nothing else', ORACLE: "the true ‖y‖"}.get(name, f'"{name}"')
        lines.append([title, *(cells[kind, name, task] for task in tasks for kind in SAMPLERS)])
    for kind in ("rows", "countsketch"):
        both = [cells[kind, "", task] for task in tasks for _ in SAMPLERS]
        lines.append([f"for comparison, `{kind}`", *both])
    first = rows[0]
    seeds = "one seed" if first["seeds"] == "1" else f"mean of {first['seeds']} seeds"
    source = f"{first['layers']} layers, {seeds}, commit `{first['commit']}`:"
    return source + "\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments; None takes those of the process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--data_dir", type=Path, required=True, help="folder with the official GLUE files")
    parser.add_argument("--tasks", nargs="+", default=["cola", "sst2"], help="GLUE tasks")
    parser.add_argument("--batch", type=int, default=64, help="sentences per batch")
    parser.add_argument("--steps", type=int, default=25, help="exact training steps before")
    parser.add_argument("--uniform_mix", type=float, default=0.1, help="part of p that all tokens share alike")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of everything")
    parser.add_argument("--csv", type=Path, default=CSV, help="file to write; README's table is made of the usual one")
    arguments = parser.parse_args(argv)
    origin = {**environment("cpu"), "seed": " ".join(map(str, arguments.seeds))}
    noises: list[Noise] = []
    for task in arguments.tasks:
        runs, padding = [], []
        for seed in arguments.seeds:
            model, batches = load_glue(
                task, arguments.data_dir, batch=arguments.batch, steps=arguments.steps, max_length=128, seed=seed
            )
            runs.append(measure(model, batches, uniform_mix=arguments.uniform_mix))
            padding.append(1 - float(batches[-1]["attention_mask"].double().mean()))
        for (kind, name), layers in runs[0].items():
            values = [median(run[kind, name]) for run in runs]
            shape = (len(runs), len(layers), mean(padding))
            noises.append(Noise(task, kind, name, mean(values), min(values), max(values), *shape))
            print(
                f"{task:6} {kind:12} {name:15} {mean(values):7.3f}  ({min(values):.3f} to {max(values):.3f})",
                flush=True,
            )
    write_noises(arguments.csv, noises, origin)
    if arguments.csv == CSV:
        README.write_text(inserted(README.read_text("utf-8"), markdown(), BEGIN, END), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
