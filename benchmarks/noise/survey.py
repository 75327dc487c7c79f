"""Sketch noise against minibatch noise on GLUE.

MiniLM as RoBERTa is fine-tuned for a few exact steps on a GLUE task; then D²_sketch / D²_SGD (samples are sequences) is
computed for all encoder linears on the next batch, for every kind and width at equal memory. Printed is the median over
the layers, whose mean over seeds goes to a csv file; pictures show all of it. For data in a file of your own,
``python -m rmm_linear.variance`` does the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from benchmarks import library
from benchmarks.noise.glue import add_glue, load_glue, padding_of, spread
from benchmarks.records import RESULTS, Surveyed, origin, write_rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_glue(parser, ("cola", "sst2", "stsb"), batch=64)
    parser.add_argument("--model_name_or_path", help="model folder, or model of the hub; default: MiniLM")
    folder = "where to write the pictures of noise against memory (out/noise)"
    parser.add_argument("--plot", type=Path, default=Path("out/noise"), metavar="FOLDER", help=folder)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of everything")
    parser.add_argument("--csv", type=Path, default=RESULTS / "noise.csv", help="file to write")
    library.add_arguments(parser, kinds=("countsketch", "rows"))


def run(arguments: argparse.Namespace) -> Iterator[str]:
    arguments.plot.mkdir(parents=True, exist_ok=True)
    about = {**origin("cpu"), "seed": " ".join(map(str, arguments.seeds))}
    how = {"batch": arguments.batch, "steps": arguments.steps, "max_length": arguments.max_seq_length}
    name = Path(arguments.model_name_or_path or "MiniLM").name
    rows: list[Surveyed] = []
    for task in arguments.tasks:
        runs, padding, layers = [], [], 0
        for seed in arguments.seeds:
            model, batches = load_glue(task, arguments.data_dir, arguments.model_name_or_path, **how, seed=seed)
            picture, title = arguments.plot / f"noise-{task}-{seed}.png", f"{task}, seed {seed}: "
            noises = library.print_survey(model, batches, arguments, picture, source=f"{name}, {task}", title=title)
            runs.append(library.medians(noises))
            padding.append(padding_of(batches[-1]))
            layers = len({entry.layer for entry in noises})
        shape = {"layers": layers, "padding": mean(padding)}
        for setting, memories in runs[0].items():
            for memory in memories:
                found = spread([one[setting][memory] for one in runs])
                rows.append(Surveyed(task=task, setting=setting, memory=memory, **found, **shape, **about))
    write_rows(arguments.csv, rows)
    yield str(arguments.csv)
