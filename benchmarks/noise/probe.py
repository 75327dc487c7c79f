"""Time that a probe costs.

MiniLM as RoBERTa, converted as by default, is trained on the generated acceptability sentences (or on CoLA itself with
``--data_dir``). In every round, three steps run on the same batch in changing order: without a probe, with a probe that
is there and does not look, and with one that looks at every converted layer. Printed are the medians over the rounds,
and what a probe every n steps makes of them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.library import table
from benchmarks.noise.glue import load_glue
from glue_finetune.acceptability import write_corpus
from rmm_linear import convert
from rmm_linear.variance import GradientProbe

PLAIN, IDLE, LOOKING = "no probe", "a probe that does not look", "a probe that looks"


def measure(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Time training steps with and without a probe, side by side."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    seconds: dict[str, list[float]] = {PLAIN: [], IDLE: [], LOOKING: []}
    for index, batch in enumerate(batches):
        kinds = list(seconds)
        for kind in kinds[index % 3 :] + kinds[: index % 3]:
            with contextlib.nullcontext() if kind == PLAIN else GradientProbe(model, every=None) as probe:
                if probe is not None and kind == LOOKING:
                    probe.arm(index)
                began = time.perf_counter()
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                spent = time.perf_counter() - began
            if index:
                seconds[kind].append(spent)
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data_dir", type=Path, help="folder with the official GLUE files; default: generated ones")
    parser.add_argument("--model_name_or_path", help="folder with the model; default: MiniLM")
    parser.add_argument("--batch", type=int, default=64, help="sentences per batch")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of three steps")
    parser.add_argument("--every", type=int, default=50, help="steps per probe")


def run(arguments: argparse.Namespace) -> Iterator[str]:
    how = {"batch": arguments.batch, "steps": arguments.rounds, "max_length": 128, "seed": 0}
    with tempfile.TemporaryDirectory() as folder:
        data = arguments.data_dir or write_corpus(Path(folder))
        model, batches = load_glue("cola", data, arguments.model_name_or_path, **how)
    convert(model)
    medians = {kind: statistics.median(spent) for kind, spent in measure(model, batches).items()}
    plain = medians[PLAIN]
    rows = [(kind, f"{1000 * median:.1f}", f"{median / plain:.3f}") for kind, median in medians.items()]
    yield table(("step with", "median, ms", "relative to no probe"), rows)
    cost = (medians[LOOKING] - plain) / plain / arguments.every
    yield f"a probe every {arguments.every} steps of batch {arguments.batch}: {100 * cost:.2f} % of training time"
