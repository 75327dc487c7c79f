"""Sketch noise against minibatch noise on GLUE: ``python -m benchmarks.noise --help``.

MiniLM as RoBERTa is fine-tuned for a few exact steps on a GLUE task; then D²_sketch / D²_SGD (samples are sequences) is
computed for all encoder linears on the next batch, for every kind and width at equal memory. Printed is the median over
the layers, whose mean over seeds goes to a csv file; pictures show all of it. For data in a file of your own,
``python -m rmm_linear.variance`` does the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.pages import fill
from benchmarks.records import RESULTS, Surveyed, origin, write_rows
from glue_finetune.minilm import save_minilm
from glue_finetune.tasks import get_task, load_task
from rmm_linear.variance.__main__ import add_arguments, count, print_survey
from rmm_linear.variance.survey.batches import make_batches
from rmm_linear.variance.survey.survey import medians

CSV = RESULTS / "noise.csv"


def load_glue(
    task_name: str, data_dir: Path, model_name: str | None = None, *, batch: int, steps: int, max_length: int, seed: int
) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Load a model with a fresh head, and batches of a task in random order.

    Args:
        task_name: A GLUE task.
        data_dir: Folder with the official GLUE files.
        model_name: A folder written by save_pretrained, or a model of the hub; None is MiniLM as RoBERTa.
        batch: Sentences per batch.
        steps: Batches to train on; one more is returned.
        max_length: Tokens per sentence at most.
        seed: Seed of everything.

    Returns:
        The model in training mode, and the batches.
    """
    torch.manual_seed(seed)
    task = get_task(task_name)
    rows = load_task(task, str(data_dir)).train
    with tempfile.TemporaryDirectory() as folder:
        if model_name is None:
            save_minilm(Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(model_name or folder)
        outputs = 1 if task.is_regression else len(task.labels)
        model = AutoModelForSequenceClassification.from_pretrained(model_name or folder, num_labels=outputs).train()
    texts = [rows[name][:] for name in ("text", "text_pair") if name in rows.column_names]
    labels = torch.tensor(rows["label"][:], dtype=torch.float32 if task.is_regression else torch.int64)
    batches = make_batches(tokenizer, texts, labels, batch=batch, steps=steps, max_length=max_length)
    for inputs in batches:
        inputs.pop("token_type_ids", None)
    return model, batches


def main(argv: list[str] | None = None) -> int:
    """Run the command; ``argv`` are its arguments, None takes those of the process. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.noise", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--data_dir", type=Path, required=True, help="folder with the official GLUE files")
    parser.add_argument("--tasks", nargs="+", default=["cola", "sst2", "stsb"], help="GLUE tasks")
    parser.add_argument("--model_name_or_path", help="model folder, or model of the hub; default: MiniLM, made anew")
    parser.add_argument("--batch", type=count(1), default=64, help="sentences per batch")
    folder = "where to write the pictures of noise against memory (out/noise)"
    parser.add_argument("--plot", type=Path, default=Path("out/noise"), metavar="FOLDER", help=folder)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of everything")
    parser.add_argument("--csv", type=Path, default=CSV, help="file to write; the table is made of the usual one")
    add_arguments(parser, kinds=("countsketch", "rows"))
    arguments = parser.parse_args(argv)
    arguments.plot.mkdir(parents=True, exist_ok=True)
    about = {**origin("cpu"), "seed": " ".join(map(str, arguments.seeds))}
    rows: list[Surveyed] = []
    for task in arguments.tasks:
        runs, padding, layers = [], [], 0
        for seed in arguments.seeds:
            model, batches = load_glue(
                task,
                arguments.data_dir,
                arguments.model_name_or_path,
                batch=arguments.batch,
                steps=arguments.steps,
                max_length=arguments.max_seq_length,
                seed=seed,
            )
            name = Path(arguments.model_name_or_path or "MiniLM").name
            picture = arguments.plot / f"noise-{task}-{seed}.png"
            title = f"{task}, seed {seed}: "
            noises = print_survey(model, batches, arguments, picture, source=f"{name}, {task}", title=title)
            runs.append(medians(noises))
            padding.append(1 - float(batches[-1]["attention_mask"].double().mean()))
            layers = len({entry.layer for entry in noises})
        for setting, memories in runs[0].items():
            for memory in memories:
                found = spread([run[setting][memory] for run in runs])
                shape = {"layers": layers, "padding": mean(padding)}
                rows.append(Surveyed(task=task, setting=setting, memory=memory, **found, **shape, **about))
    write_rows(arguments.csv, rows)
    if arguments.csv == CSV:
        fill.update()
    return 0


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Say what seeds found.

    Args:
        values: One of each seed.

    Returns:
        Fields of :class:`benchmarks.records.Noise`.
    """
    return {"noise": mean(values), "least": min(values), "most": max(values), "seeds": len(values)}


if __name__ == "__main__":
    sys.exit(main())
