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
from rmm_linear import ConversionReport, RMMConfig, convert

logger = logging.getLogger(__name__)


def load_config(task: Task, name: str) -> Any:
    """Load a model's configuration, with the task's number of outputs; a UserError if it cannot be had."""
    if task.is_regression:
        return _from_pretrained(AutoConfig, name, num_labels=1, problem_type="regression")
    names = dict(enumerate(task.labels))
    return _from_pretrained(AutoConfig, name, id2label=names, label2id={label: place for place, label in names.items()})


def load_tokenizer(name: str) -> Tokenizer:
    """Load a model's tokenizer; a UserError if it cannot be had, or cannot pad."""
    tokenizer = _from_pretrained(AutoTokenizer, name)
    if tokenizer.pad_token_id is None:
        raise UserError(
            f"The tokenizer must have a padding token, got {type(tokenizer).__name__} of {name} without one. "
            "Set one and save the tokenizer again."
        )
    return tokenizer


def load_model(name: str, config: Any) -> PreTrainedModel:
    """Load a model with a classifier; the log names the tensors that are not in its file and start at random."""
    model, info = _from_pretrained(AutoModelForSequenceClassification, name, config=config, output_loading_info=True)
    logger.info("%s: random start for %s", name, ", ".join(sorted(info["missing_keys"])) or "nothing")
    return model


def check_conversion(model_config: Any, config: RMMConfig | None) -> None:
    """Raise a UserError if a sketch configuration does not fit a model, whose weights are not loaded for this."""
    try:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(model_config)
    except (KeyError, ValueError) as error:
        raise UserError(f"The model must have a class for sequence classification: {one_line(error)}") from error
    sketch(model, config, dry_run=True)


def sketch(model: torch.nn.Module, config: RMMConfig | None, dry_run: bool = False) -> ConversionReport | None:
    """Convert a model in place, or only check that the sketch fits it; None is the exact baseline."""
    if config is None:
        return None
    try:
        return convert(model, config, dry_run=dry_run)
    except (ValueError, TypeError) as error:
        raise UserError(one_line(error)) from error


def limit_length(tokenizer: Tokenizer, max_length: int) -> int:
    """Return the tokens per row at most, the wanted ones or what the model can take, which the log then says."""
    limit = min(max_length, tokenizer.model_max_length)
    if limit < max_length:
        logger.info("max_seq_length: %d is more than the model takes, %d is used", max_length, limit)
    return limit


def tokenize(rows: datasets.Dataset, tokenizer: Tokenizer, max_length: int) -> datasets.Dataset:
    """Replace texts by "input_ids", "attention_mask" and whatever else the model reads, without padding."""

    def encode(batch: dict[str, list[str]]) -> Any:
        return tokenizer(batch["text"], batch.get("text_pair"), truncation=True, max_length=max_length)

    texts = [name for name in rows.column_names if name != "label"]
    return rows.map(encode, batched=True, remove_columns=texts, desc="Tokenizing")


def take_columns(rows: datasets.Dataset, model: torch.nn.Module) -> datasets.Dataset:
    """Leave out, in the place of the Trainer, the columns that a model's forward does not name, but not "label"."""
    taken = {"label", *inspect.signature(model.forward).parameters}
    return rows.select_columns([name for name in rows.column_names if name in taken])


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
