"""``rmm-linear explain``: what a conversion saves of a model of transformers."""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rmm_linear._support.validation import check_integer
from rmm_linear.command.main import PROGRAM
from rmm_linear.config import RMMConfig
from rmm_linear.conversion.convert import convert
from rmm_linear.conversion.explanation import explained
from rmm_linear.variance.survey.batches import import_transformers, model_class, read_batches


def explain_model(arguments: argparse.Namespace) -> int:
    """Print what a conversion saves.

    Args:
        arguments: ``model``, ``batch``, ``size``, ``length``, ``rmm_config`` and ``operations`` of the command line.

    Returns:
        The exit status: 0, or 2 for bad input.
    """
    try:
        return _explain(arguments)
    except (OSError, ValueError, TypeError, ImportError, AttributeError, RuntimeError) as error:
        print(f"{PROGRAM} explain: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _explain(arguments: argparse.Namespace) -> int:
    check_integer("size", arguments.size)
    check_integer("length", arguments.length)
    config = RMMConfig() if arguments.rmm_config is None else RMMConfig.load(arguments.rmm_config)
    if arguments.operations is not None:
        config = config.replace(operations=arguments.operations)
    if arguments.model.startswith((".", "/", "~")) and not Path(arguments.model).expanduser().is_dir():
        raise ValueError(
            "MODEL must be a folder written by save_pretrained, or the name of a model of the hub, got "
            f"{arguments.model}, which is not there."
        )
    settings = import_transformers().AutoConfig.from_pretrained(arguments.model)
    torch.manual_seed(0)
    model = model_class(settings)(settings).train()
    if arguments.batch is None:
        batch = _random_batch(model, arguments.size, arguments.length)
    else:
        batch = read_batches(Path(arguments.batch))[0]
    report = convert(model, config)
    try:
        found = explained(model, report, batch)
    except Exception as error:  # of the model's own code
        is_random, got = arguments.batch is None, f"{type(error).__name__}: {error}".strip().rstrip(".")
        if " out of " in str(error) and not isinstance(error, torch.OutOfMemoryError):
            remedy = "Give a smaller --length." if is_random else "Check the numbers in the batch."
            raise ValueError(f"A position or token of the batch is none of the model's ({error}). {remedy}") from error
        names = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind != p.VAR_KEYWORD]
        takes = f"{type(model).__name__} takes {', '.join(names)}."
        remedy = (
            "Save a batch that it takes with torch.save({...}, path), and give it by --batch. " if is_random else ""
        )
        raise ValueError(f"The model does not take this batch: {got}. {remedy}{takes}") from error
    print(found)
    return 0


def _random_batch(model: Any, size: int, length: int) -> dict[str, torch.Tensor]:
    """Random tokens and labels; a ValueError if the model takes something else."""
    if not isinstance(model.get_input_embeddings(), nn.Embedding) or model.main_input_name != "input_ids":
        raise ValueError(
            f"Random batches are of tokens, and {type(model).__name__} takes {model.main_input_name}. "
            "Save a batch with torch.save({...}, path), and give it by --batch."
        )
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(vocabulary, (size, length))
    kind = type(model).__name__
    if kind.endswith("ForMultipleChoice"):
        raise ValueError(f"{kind} takes several texts per example. Save a batch of them, and give it by --batch.")
    if getattr(model.config, "problem_type", None) == "multi_label_classification":
        labels = torch.zeros(size, model.config.num_labels)
    elif kind.endswith("ForSequenceClassification"):
        labels = torch.zeros(size, dtype=torch.long if model.config.num_labels > 1 else torch.float32)
    elif kind.endswith("ForTokenClassification"):
        labels = torch.zeros(size, length, dtype=torch.long)
    else:
        labels = ids if model.get_output_embeddings() is not None else None
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return batch if labels is None else {**batch, "labels": labels}
