"""What whole blocks save, and the noise of it, by operation: ``python -m benchmarks.blocks --help``.

``bytes`` counts what autograd saves of a forward pass, exactly and with the operations converted one after the other.
``noise`` trains MiniLM as RoBERTa for a few exact steps on GLUE tasks, and a random RoBERTa and LLaMA of 12 and 24
layers on tokens of a Markov chain, and measures the noise of the whole gradient on the next batch.
``left`` explains what ten families of models still save that is no stand-in, see ``benchmarks/left.py``.
``steps`` times training steps, exact and converted ones in turns.
``peaks`` compares the bytes that a step saves with its peak of live bytes, and of the process, see
``benchmarks/peaks.py``.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.block_cases import SETTINGS, cases, inputs, llama, roberta, saved, steps
from benchmarks.left import LeftRow, measure_left
from benchmarks.noise import load_glue
from benchmarks.peaks import PeakRow, measure_peaks
from benchmarks.records import RESULTS, Origin, origin, write_rows
from rmm_linear import RMMConfig, convert, revert
from rmm_linear._support.tables import table
from rmm_linear.config import OPERATIONS
from rmm_linear.context.auto_bits import STEPS
from rmm_linear.variance import gradient_noise


@dataclass(frozen=True)
class BlockRow(Origin):
    """One model with some operations converted.

    Attributes:
        what: "bytes", "noise" or "steps".
        case: Title of the case.
        operations: What is converted, or "exact".
        dtype: dtype of the model.
        value: Bytes saved; D² / D²_SGD of the whole gradient; or seconds of a step.
        relative: Bytes or seconds by the exact model's.
        median: For noise, the median over the weights.
        first: For noise, the first layer's.
        seed: Seed of the run.
    """

    what: str
    case: str
    operations: str
    dtype: str = "float32"
    value: float = 0.0
    relative: float | None = None
    median: float | None = None
    first: float | None = None
    seed: int = 0


def measure_bytes(tiny: bool) -> Iterator[BlockRow]:
    """Count saved bytes of every case: exact, the operations one after the other, and all but linears."""
    for title, make, shape, dtype in cases(tiny):
        torch.manual_seed(0)
        model = make().to(dtype)
        batch = inputs(model, *shape)
        kind = str(dtype).removeprefix("torch.")
        exact = saved(model, batch)
        yield BlockRow("bytes", title, "exact", kind, exact, 1.0)
        sets = [OPERATIONS[:count] for count in range(1, len(OPERATIONS) + 1)]
        for operations in [*sets, OPERATIONS[1:]]:
            convert(model, operations=operations)
            count = saved(model, batch)
            revert(model)
            yield BlockRow("bytes", title, " ".join(operations), kind, count, count / exact)


def measure_noise(data: Path | None, draws: int, tiny: bool) -> Iterator[BlockRow]:
    """Measure the noise of GLUE tasks, and of random deep models after 200 steps."""
    for task in ("sst2", "cola", "stsb") if data is not None else ():
        model, batches = load_glue(task, data, batch=64, steps=25, max_length=128, seed=0)  # pyright: ignore[reportArgumentType]
        yield from _noise(task, model, batches, draws)
    deep = {"width": 128, "vocabulary": 1000}
    for title, make in (
        ("roberta", lambda layers: roberta(0.1, layers, **deep)),
        ("llama", lambda n: llama(n, **deep)),
    ):
        for layers in (2,) if tiny else (12, 24):
            torch.manual_seed(0)
            model = make(layers)
            steps = 2 if tiny else 200
            batches = [inputs(model, 16, 64, seed) for seed in range(steps + 1)]
            yield from _noise(f"{title}, {layers} layers", model, batches, draws)


def _noise(title: str, model: nn.Module, batches: list[dict[str, Any]], draws: int) -> Iterator[BlockRow]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for batch in batches[:-1]:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    found = gradient_noise(model, batches[-1], RMMConfig(), draws=draws)
    print(f"{title}:\n{found}", flush=True)
    for operation in found.stand_ins:
        first = next((value for block, value in found.by_depth(operation).items() if block.endswith(".0")), None)
        yield BlockRow(
            "noise",
            title,
            operation,
            value=found.whole(operation),
            median=found.median_of_weights(operation),
            first=first,
        )


def measure_steps(rounds: int, tiny: bool) -> Iterator[BlockRow]:
    """Time steps of RoBERTa-base's shape, exact, with linears alone and with everything, in turns."""
    for title, make, shape in steps(tiny):
        torch.manual_seed(0)
        models: dict[tuple[str, ...], nn.Module] = {(): make()}
        batch = inputs(models[()], *shape)
        for setting in SETTINGS[1:]:
            shared = {id(parameter): parameter for parameter in models[()].parameters()}
            models[setting] = copy.deepcopy(models[()], shared)
            convert(models[setting], operations=setting)
        seconds: dict[tuple[str, ...], list[float]] = {setting: [] for setting in SETTINGS}
        for turn in range(-STEPS - 1, rounds):  # until auto has chosen, which takes time in these steps
            for setting in SETTINGS if turn % 2 else reversed(SETTINGS):
                began = time.thread_time()
                models[setting](**batch).loss.backward()
                if turn >= 0:
                    seconds[setting].append(time.thread_time() - began)
                models[setting].zero_grad(set_to_none=False)
        for setting in SETTINGS:
            ratio = statistics.median(a / b for a, b in zip(seconds[setting], seconds[()], strict=True))
            value = statistics.median(seconds[setting])
            yield BlockRow("steps", title, " ".join(setting) or "exact", value=value, relative=ratio)


def main(argv: list[str] | None = None) -> int:
    """Run the command; ``argv`` are its arguments, None takes those of the process. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blocks", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("what", choices=("bytes", "left", "noise", "peaks", "steps"))
    parser.add_argument("--data_dir", type=Path, help="folder with the official GLUE files, for noise")
    parser.add_argument("--draws", type=int, default=4, help="gradients per setting, for noise")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps per setting")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the csv files")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the command")
    arguments = parser.parse_args(argv)
    if arguments.what == "bytes":
        rows = measure_bytes(arguments.tiny)
    elif arguments.what == "left":
        rows = measure_left(arguments.tiny)
    elif arguments.what == "noise":
        rows = measure_noise(arguments.data_dir, arguments.draws, arguments.tiny)
    elif arguments.what == "peaks":
        rows = measure_peaks(arguments.tiny)
    else:
        rows = measure_steps(arguments.rounds, arguments.tiny)
    where = origin("cpu")
    found: list[BlockRow | LeftRow | PeakRow] = []
    columns = {
        "left": ("case", "modules", "exact", "value", "share", "reason"),
        "peaks": ("case", "operations", "saved", "live", "rss", "live_fall", "rss_fall"),
    }.get(arguments.what, ("case", "dtype", "operations", "value", "relative", "median", "first"))
    for row in rows:
        found.append(replace(row, **where))
        print(" ".join(filter(None, (_cell(getattr(row, name)) for name in columns))), flush=True)
    write_rows(arguments.out / f"blocks-{arguments.what}.csv", found)
    print(table(columns, [tuple(_cell(getattr(row, name)) for name in columns) for row in found]))
    return 0


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | int) else str(value or "")


if __name__ == "__main__":
    sys.exit(main())
