"""Sketch noise against minibatch noise on GLUE: ``python -m benchmarks.noise --help``.

MiniLM as RoBERTa is fine-tuned for a few exact steps on a GLUE task; then D²_sketch / D²_SGD (samples are sequences) is
computed for all encoder linears on the next batch, for every kind and width at equal memory. Printed is the median over
the layers. For another model or data, ``python -m rmm_linear.variance`` does the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from glue_finetune.data import load_task
from glue_finetune.minilm import save_minilm
from glue_finetune.tasks import get_task
from rmm_linear.sketches import KINDS
from rmm_linear.variance import MEMORIES, describe, noise_at_memory, train_and_record


def load_glue(
    task_name: str, data_dir: Path, *, batch: int, steps: int, max_length: int, seed: int
) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Load MiniLM with a fresh head, and batches of a task in random order.

    Args:
        task_name: A GLUE task.
        data_dir: Folder with the official GLUE files.
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
        save_minilm(Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        labels = 1 if task.is_regression else len(task.labels)
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=labels).train()
    order = torch.randperm(len(rows))
    batches = []
    for places in order[: (steps + 1) * batch].split(batch):
        chosen = rows.select(places.tolist())
        texts = [chosen["text"][:], *([chosen["text_pair"][:]] if "text_pair" in chosen.column_names else [])]
        inputs = dict(tokenizer(*texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt"))
        inputs.pop("token_type_ids", None)
        dtype = torch.float32 if task.is_regression else torch.int64
        batches.append({**inputs, "labels": torch.tensor(chosen["label"][:], dtype=dtype)})
    return model, batches


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments; None takes those of the process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.noise", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--data_dir", type=Path, required=True, help="folder with the official GLUE files")
    parser.add_argument("--tasks", nargs="+", default=["sst2", "cola", "stsb"], help="GLUE tasks")
    parser.add_argument("--kinds", nargs="+", default=["countsketch"], choices=KINDS, help="kinds of sketches")
    parser.add_argument("--batch", type=int, default=64, help="sentences per batch")
    parser.add_argument("--steps", type=int, default=25, help="exact training steps before")
    parser.add_argument("--max_seq_length", type=int, default=128, help="tokens per sentence at most")
    parser.add_argument("--memory", type=float, nargs="+", default=MEMORIES, help="fractions of the input's bytes")
    parser.add_argument("--itemsize", type=int, default=2, choices=(2, 4), help="bytes per element of the input")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything")
    arguments = parser.parse_args(argv)
    shape = {"memories": arguments.memory, "itemsize": arguments.itemsize}
    for task in arguments.tasks:
        model, batches = load_glue(
            task,
            arguments.data_dir,
            batch=arguments.batch,
            steps=arguments.steps,
            max_length=arguments.max_seq_length,
            seed=arguments.seed,
        )
        records, choices = train_and_record(model, batches, **shape)
        noises = noise_at_memory(records, kinds=arguments.kinds, choices=choices, **shape)
        print(f"{task}: {describe(records, noises, arguments.itemsize)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
