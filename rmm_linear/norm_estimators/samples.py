"""Batches with the data set indices of their examples, for the norm estimator "sample_cache".

A converted model removes ``sample_index`` from the keyword arguments of its outermost call, before its forward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils.data import Dataset

SAMPLE_INDEX = "sample_index"


class IndexedDataset(Dataset[dict[str, Any]]):
    """A map-style data set that adds to every example its index, as ``sample_index``.

    Args:
        dataset: A map-style data set with a length and dictionaries as examples, such as a ``datasets.Dataset``.

    Raises:
        TypeError: If it has no length or cannot be indexed.

    Example:
        >>> IndexedDataset([{"labels": 5}, {"labels": 7}])[1]
        {'labels': 7, 'sample_index': 1}
    """

    def __init__(self, dataset: Any) -> None:
        """Wrap the data set."""
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise TypeError(f"dataset must have a length and be indexed by numbers, got {type(dataset).__name__}.")
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return an example with its index."""
        example = self.dataset[index]
        _check_dictionary("An example", example, Mapping)
        return {**example, SAMPLE_INDEX: index}


def with_sample_index(collator: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Wrap a collator that does not know ``sample_index``, so that batches contain it.

    With transformers' Trainer, pass ``TrainingArguments(remove_unused_columns=False)``: otherwise it drops every column
    that is not an argument of the model's forward, this one too. Evaluation sets need no indices: if examples have
    none, nothing is added.

    Args:
        collator: Makes a batch, a dictionary, from a list of examples.

    Returns:
        A collator that calls the wrapped one without the indices and adds them as ``sample_index``, int64 of shape
        (batch,).

    Example:
        >>> import torch, rmm_linear
        >>> from torch.utils.data import DataLoader, default_collate
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(8, 2)
        ...     def forward(self, x):
        ...         return self.layer(x).square().mean()
        >>> model = Model()
        >>> _ = rmm_linear.convert(model, kind="wta", ratio=0.3, min_rows=1, norm_estimator="sample_cache")
        >>> data = IndexedDataset([{"x": torch.randn(10, 8)} for _ in range(6)])
        >>> for epoch in range(2):
        ...     for batch in DataLoader(data, 3, shuffle=True, collate_fn=with_sample_index(default_collate)):
        ...         model(**batch).backward()
        >>> model.layer.rmm_estimator.bytes  # 2 for each of 6 × 10 tokens, and 8
        128
    """
    return _Collator(collator)


class _Collator:
    """A class and not a closure, because a DataLoader pickles it for its workers."""

    def __init__(self, collator: Callable[[list[Any]], Any]) -> None:
        if not callable(collator):
            raise TypeError(f"collator must make a batch of a list of examples, got {collator!r}.")
        self.collator = collator

    def __call__(self, examples: list[Any]) -> Any:
        for example in examples:
            _check_dictionary("An example", example, Mapping)
        numbers = [example.get(SAMPLE_INDEX) for example in examples]
        batch = self.collator([{k: v for k, v in example.items() if k != SAMPLE_INDEX} for example in examples])
        if None not in numbers:
            _check_dictionary("The collator's batch", batch, MutableMapping)
            batch[SAMPLE_INDEX] = torch.tensor(numbers, dtype=torch.int64)
        return batch


def _check_dictionary(what: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(
            f"{what} must be a dictionary, got {type(value).__name__}. "
            "With others, pass sample_index=... to the model yourself."
        )
