"""Load the tokenizer and the model, cut the texts into tokens, and sketch the model's linear layers."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from glue_finetune.errors import UserError, one_line
from glue_finetune.tasks import Task
from rmm_linear import ConversionReport, RMMConfig, convert, read_sketch_state
from rmm_linear.norm_estimators.samples import SAMPLE_INDEX

logger = logging.getLogger(__name__)


def load_config(task: Task, name: str) -> Any:
    """Load a model's configuration with the task's number of outputs.

    Args:
        task: The task.
        name: A folder written by save_pretrained, or a model of the hub.

    Returns:
        The transformers configuration.

    Raises:
        UserError: If there is no such folder or model, or the hub cannot be reached.
    """
    if task.is_regression:
        return _from_pretrained(AutoConfig, name, num_labels=1, problem_type="regression")
    names = dict(enumerate(task.labels))
    return _from_pretrained(AutoConfig, name, id2label=names, label2id={label: place for place, label in names.items()})


def load_tokenizer(name: str) -> Tokenizer:
    """Load a model's tokenizer.

    Args:
        name: A folder written by save_pretrained, or a model of the hub.

    Returns:
        The tokenizer, which can pad.

    Raises:
        UserError: If it cannot be loaded or has no padding token.
    """
    tokenizer = _from_pretrained(AutoTokenizer, name)
    if tokenizer.pad_token_id is None:
        raise UserError(
            f"The tokenizer must have a padding token, got {type(tokenizer).__name__} of {name} without one. "
            "Set one and save the tokenizer again."
        )
    return tokenizer


def load_model(name: str, config: Any) -> PreTrainedModel:
    """Load a model with pretrained weights and a classifier for the task.

    Args:
        name: A folder written by save_pretrained, or a model of the hub.
        config: Its configuration, see :func:`load_config`.

    Returns:
        The model; the tensors that its file lacks start from random values and are named in the log.

    Raises:
        UserError: If the weights cannot be loaded.
    """
    model, info = _from_pretrained(AutoModelForSequenceClassification, name, config=config, output_loading_info=True)
    logger.info("%s: random start for %s", name, ", ".join(sorted(info["missing_keys"])) or "nothing")
    return model


def check_conversion(model_config: Any, config: RMMConfig | None) -> None:
    """Check that a sketch configuration fits a model, without loading its weights.

    Args:
        model_config: The model's configuration.
        config: The sketch; None fits every model.

    Raises:
        UserError: If it does not fit, for example as the model has no linear layer.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(model_config)
    except (KeyError, ValueError) as error:
        raise UserError(f"The model must have a class for sequence classification: {one_line(error)}") from error
    sketch(model, config, dry_run=True)


def sketch(model: torch.nn.Module, config: RMMConfig | None, dry_run: bool = False) -> ConversionReport | None:
    """Convert a model's linear layers in place.

    Args:
        model: The model.
        config: The sketch; None leaves the model as it is.
        dry_run: Only check.

    Returns:
        What was converted; None for the exact baseline.

    Raises:
        UserError: If the configuration does not fit the model.
    """
    if config is None:
        return None
    try:
        return convert(model, config, dry_run=dry_run)
    except (ValueError, TypeError) as error:
        raise UserError(one_line(error)) from error


def restore_sketch(model: torch.nn.Module, path: Path) -> None:
    """Give a converted model's sketches the state that a checkpoint has beside the weights.

    Args:
        model: The model, converted as it was.
        path: File written by ``rmm_linear.save_sketch_state``.

    Raises:
        UserError: If the file is missing or malformed.
    """
    try:
        read_sketch_state(model, path)
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot resume: {one_line(error)}") from error


def limit_length(tokenizer: Tokenizer, max_length: int) -> int:
    """Cut the wanted length to what the model can take.

    Args:
        tokenizer: The model's tokenizer.
        max_length: Tokens per row wanted at most.

    Returns:
        Tokens per row at most; a line in the log says so where it is less than wanted.
    """
    limit = min(max_length, tokenizer.model_max_length)
    if limit < max_length:
        logger.info("max_seq_length: %d is more than the model takes, %d is used", max_length, limit)
    return limit


def tokenize(rows: datasets.Dataset, tokenizer: Tokenizer, max_length: int) -> datasets.Dataset:
    """Turn texts into token numbers, without padding.

    Args:
        rows: Rows with "text", for pairs also "text_pair", and "label".
        tokenizer: The model's tokenizer.
        max_length: Tokens per row at most.

    Returns:
        Rows with "input_ids", "attention_mask", whatever else the model reads, and "label".
    """

    def encode(batch: dict[str, list[str]]) -> Any:
        return tokenizer(batch["text"], batch.get("text_pair"), truncation=True, max_length=max_length)

    texts = [name for name in rows.column_names if name != "label"]
    return rows.map(encode, batched=True, remove_columns=texts, desc="Tokenizing")


def take_columns(rows: datasets.Dataset, model: torch.nn.Module) -> datasets.Dataset:
    """Leave out the columns that a model does not take, in the place of the Trainer.

    Args:
        rows: Rows made by :func:`tokenize`.
        model: The model.

    Returns:
        The rows with the columns that its forward names, and "label".
    """
    taken = {"label", *inspect.signature(model.forward).parameters}
    return rows.select_columns([name for name in rows.column_names if name in taken])


def number_rows(rows: datasets.Dataset) -> datasets.Dataset:
    """Give training rows their numbers, by which norm estimators may remember them.

    Args:
        rows: The rows.

    Returns:
        The rows with "sample_index".
    """
    numbers: Any = list(range(len(rows)))
    return rows.add_column(SAMPLE_INDEX, numbers)


def _from_pretrained(cls: Any, name: str, **options: Any) -> Any:
    """Call from_pretrained, quietly, and turn its many errors into one line."""
    path = Path(name).expanduser()
    if path.is_dir():
        name = str(path)
        if not (path / "config.json").is_file():
            raise UserError(
                f"model_name_or_path must be a folder written by save_pretrained; {name} has no config.json."
            )
    elif name.count("/") > 1 or name.startswith((".", "/", "~")):  # the hub's names are "model" or "owner/model"
        raise UserError(f"model_name_or_path must be a folder or a model of the hub; there is no folder {name}.")
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        return cls.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"Cannot load {name} ({one_line(error)}). Give --model_name_or_path, a folder written by save_pretrained, "
            "or a model of the hub with a connection to it."
        ) from error
    finally:
        transformers.logging.set_verbosity(level)
