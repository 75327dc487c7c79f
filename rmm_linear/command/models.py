"""Make the model and the batch for commands that run a model of transformers, and word their errors."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rmm_linear._support.sizes import show_bytes
from rmm_linear._support.validation import check_integer
from rmm_linear.command import PROGRAM
from rmm_linear.command.known_models import KNOWN, known
from rmm_linear.fitting.link import memory_of_host
from rmm_linear.variance.survey.batches import (
    import_transformers,
    model_class,
    read_batches,
    read_configuration,
)

# What the input of a user raises in a command, which prints it.
ERRORS = (OSError, ValueError, TypeError, ImportError, AttributeError, RuntimeError)


def random_model(name: str) -> nn.Module:
    """Make a model with random weights: of a folder, of the hub, or one whose sizes are known here."""
    settings = _configuration(name)
    with torch.device("meta"):
        needed = sum(parameter.nbytes for parameter in model_class(settings)(settings).parameters())
    if (there := memory_of_host()) is not None and needed > there:
        raise ValueError(
            f"The weights of {name} take {show_bytes(needed)}, of {show_bytes(there)} that this machine has for them. "
            f"{PROGRAM} doctor, fit and longest need none."
        )
    torch.manual_seed(0)
    return model_class(settings)(settings).train()


def model_on_meta(name: str) -> Any:
    """Make such a model without weights, in bfloat16."""
    settings = _configuration(name)
    settings.use_cache = False
    with torch.device("meta"):
        return model_class(settings)._from_config(settings, dtype=torch.bfloat16).train()


def _configuration(name: str) -> Any:
    found = None if Path(name).is_dir() else known(name)
    if found is not None:
        return import_transformers().AutoConfig.for_model(found[0], **found[1])
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise ValueError(
            f"MODEL must be a folder written by save_pretrained, or the name of a model of the hub, got {name}, which "
            "is not there."
        )
    return read_configuration(name, KNOWN)


def check_batch(arguments: argparse.Namespace) -> None:
    check_integer("size", arguments.size)
    check_integer("length", arguments.length)


def batch_for(model: nn.Module, arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.batch is None:
        return random_batch(model, arguments.size, arguments.length)
    return read_batches(Path(arguments.batch))[0]


@contextmanager
def running(model: nn.Module, is_random: bool) -> Iterator[None]:
    """Say what to do about what a model's own code raises inside the block."""
    try:
        yield
    except Exception as error:  # of the model's own code
        got = f"{type(error).__name__}: {error}".strip().rstrip(".")
        if " out of " in str(error) and not isinstance(error, torch.OutOfMemoryError):
            remedy = "Give a smaller --length." if is_random else "Check the numbers in the batch."
            raise ValueError(
                f"A position or token of the batch is out of the model's range ({error}). {remedy}"
            ) from error
        names = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind != p.VAR_KEYWORD]
        takes = f"{type(model).__name__} takes {', '.join(names)}."
        remedy = (
            "Save a batch that it takes with torch.save({...}, path), and give it by --batch. " if is_random else ""
        )
        raise ValueError(f"The model does not take this batch: {got}. {remedy}{takes}") from error


def random_batch(model: Any, size: int, length: int) -> dict[str, torch.Tensor]:
    """Return random tokens and labels; a ValueError if the model takes something else."""
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
