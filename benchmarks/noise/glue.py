"""MiniLM as RoBERTa with a fresh head, and batches of GLUE tasks: what the measurements of noise train on."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.library import make_batches
from glue_finetune.minilm import save_minilm
from glue_finetune.tasks import get_task, load_task


def add_glue(parser: argparse.ArgumentParser, tasks: Sequence[str], *, batch: int) -> None:
    parser.add_argument("--data_dir", type=Path, required=True, help="folder with the official GLUE files")
    parser.add_argument("--tasks", nargs="+", default=list(tasks), help="GLUE tasks")
    parser.add_argument("--batch", type=int, default=batch, help="sentences per batch")


def load_glue(
    task_name: str, data_dir: Path, model_name: str | None = None, *, batch: int, steps: int, max_length: int, seed: int
) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Load a model with a fresh head, and batches of a task in random order."""
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


def train(model: nn.Module, batches: Iterable[Mapping[str, Any]], learning_rate: float = 1e-4) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for batch in batches:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    optimizer.zero_grad()


def padding_of(batch: Mapping[str, Any]) -> float:
    """Return the part of a batch's tokens that is padding."""
    return 1 - float(batch["attention_mask"].double().mean())


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Say what seeds found, as fields of :class:`benchmarks.records.Noise`."""
    return {"noise": mean(values), "least": min(values), "most": max(values), "seeds": len(values)}
