"""Read a model and its training batches for ``python -m rmm_linear.variance``: transformers is imported here only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear._support.installing import INSTALL_EXTRA
from rmm_linear._support.validation import did_you_mean

_SECONDS = 5.0  # for an answer of the hub


def load_tensors(model_name: str, path: Path) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Load a model in its own class, and batches that ``torch.save`` wrote: mappings of its keyword arguments."""
    batches = read_batches(path)
    settings = read_configuration(model_name)
    return model_class(settings).from_pretrained(model_name).train(), batches


def read_batches(path: Path) -> list[dict[str, Any]]:
    """Read batches that ``torch.save`` wrote: one or a list of mappings of a model's keyword arguments."""
    example = "torch.save({'input_ids': ..., 'labels': ...}, path)"
    try:
        content = torch.load(path, weights_only=True)
    except Exception as error:  # bytes of something else end in any
        if isinstance(error, EOFError):
            got = "one that ends before its first batch"
        elif isinstance(error, UnpicklingError):
            got = "another, or one with more in it than dictionaries, lists and tensors"
        else:
            got = f"none ({error.strerror})" if isinstance(error, OSError) else f"another ({type(error).__name__})"
        raise ValueError(
            f"{path} must be a .pt file written by torch.save, got {got}. Save one with {example}."
        ) from error
    batches = content if isinstance(content, list) else [content]
    if not batches or not all(isinstance(batch, dict) for batch in batches):
        raise ValueError(
            f"{path} must hold a mapping of the model's keyword arguments, or a list of them, got "
            f"{type(content).__name__}. Save one with {example}."
        )
    return batches


def read_configuration(name: str, known: Iterable[str] = ()) -> Any:
    """Read a model's configuration of a folder, of the hub's cache, or of the hub, if that answers at once."""
    config = import_transformers().AutoConfig
    if Path(name).is_dir():
        return config.from_pretrained(name)
    try:
        return config.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):  # it is not there
        got = _reached()
    if not got:
        try:
            return config.from_pretrained(name)
        except (OSError, ValueError) as error:
            got = " ".join(str(error).split())
    names = list(known)
    others = f" Without the hub, there are {', '.join(names)}." if names else ""
    raise ValueError(
        f"MODEL must be a folder written by save_pretrained, or a model of the hub, got {name}: {got}.{others}"
        f"{did_you_mean(name.rpartition('/')[2].lower(), names)}"
    )


def _reached() -> str:
    """Return why the hub cannot be reached, or nothing; its client would try again for half a minute."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception as error:  # of the client, which is another one in each version
        return f"it is not in the cache, and {constants.ENDPOINT} does not answer ({error})"
    return ""


def model_class(settings: Any) -> Any:
    name = (settings.architectures or ["none"])[0]
    if not hasattr(import_transformers(), name):
        raise ValueError(f"The model's class must be one of transformers, got {name}. Save the model with its head.")
    return getattr(import_transformers(), name)


def load_texts(
    model_name: str, path: Path, *, batch: int, steps: int, max_length: int
) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Load a model for sequence classification, in training mode, and batches of labelled texts in random order.

    path: Text file without header, one example per line: text, tab, label; or text, tab, second text, tab, label. It is
    read again from its start if it is too short. Labels are the numbers of classes, or their names, as the model's
    ``label2id`` has them or, where it knows none of them, in the order of the alphabet. Where all are numbers and one
    has a decimal point, the task is a regression. steps: Batches to train on; one more is returned.
    """
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not rows or {len(row) for row in rows} not in ({2}, {3}):
        raise ValueError(
            f"{path} must have lines of text, tab, label, or of text, tab, second text, tab, label, got "
            f"{len(rows)} lines with {sorted({len(row) for row in rows})} fields. Or give a .pt file."
        )
    transformers = import_transformers()
    config = read_configuration(model_name)
    labels = read_labels([row[-1].strip() for row in rows], config.label2id or {})
    outputs = 1 if labels.is_floating_point() else max(int(labels.max()) + 1, config.num_labels)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_name)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(model_name, num_labels=outputs).train()
    texts = [[row[part] for row in rows] for part in range(len(rows[0]) - 1)]
    return model, make_batches(tokenizer, texts, labels, batch=batch, steps=steps, max_length=max_length)


def make_batches(
    tokenizer: Any, texts: Sequence[Sequence[str]], labels: Tensor, *, batch: int, steps: int, max_length: int
) -> list[dict[str, Any]]:
    """Make ``steps`` + 1 training batches of examples in random order."""
    count = (steps + 1) * batch
    places = torch.cat([torch.randperm(len(labels)) for _ in range(-(-count // len(labels)))])[:count]
    batches = []
    for part in places.split(batch):
        chosen = [[column[place] for place in part.tolist()] for column in texts]
        inputs = tokenizer(*chosen, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        batches.append({**inputs, "labels": labels[part]})
    return batches


def read_labels(texts: Sequence[str], known: Mapping[str, int]) -> Tensor:
    """Turn labels into int64 numbers of classes, or float32 of a regression; ``known`` has the model's names."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        numbers = []
    if numbers and any("." in text for text in texts):
        return torch.tensor(numbers)
    try:
        classes = [int(text) for text in texts]
    except ValueError:
        names = sorted(set(texts))
        unknown = [name for name in names if name not in known]
        if unknown and len(unknown) < len(names):
            raise ValueError(
                f"Labels must be names that the model knows ({', '.join(known)}), got {', '.join(unknown)} among them."
            ) from None
        place = dict(known) if not unknown else {name: number for number, name in enumerate(names)}
        classes = [place[text] for text in texts]
    if min(classes) < 0:
        raise ValueError(f"Labels of classes must count from 0, got {min(classes)}. Numbers with a point are targets.")
    return torch.tensor(classes)


def import_transformers() -> Any:
    """Import transformers, silent about what it does."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"This command needs transformers. Run {INSTALL_EXTRA}.") from error
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
