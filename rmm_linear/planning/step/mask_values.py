"""What transformers reads from the values of a batch when it makes masks, in steps on fake tensors, which have none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

_PACKED = "find_packed_sequence_indices"
_IGNORES = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


@contextmanager
def masks_by_values(batch: Any) -> Iterator[None]:
    """Let transformers make the masks inside of the block that it makes for a batch whose values it can read.

    Where it cannot, it takes the tokens of a row for several texts, and a mask of ones for one that has zeros: then
    there is a mask for all pairs of tokens. With position ids, rows may be packed; of a batch on the meta device, the
    mask may have zeros.
    """
    masks = sys.modules.get("transformers.masking_utils")
    given = batch if isinstance(batch, Mapping) else {}
    instead: dict[str, Callable[..., Any]] = {}
    if given.get("position_ids") is None and hasattr(masks, _PACKED):
        instead[_PACKED] = lambda position_ids: None
    if _masks_nothing(given):
        instead |= {name: _without_mask(getattr(masks, name)) for name in _IGNORES if hasattr(masks, name)}
    before = {name: getattr(masks, name) for name in instead}
    for name, function in instead.items():
        setattr(masks, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(masks, name, function)


def _masks_nothing(batch: Mapping[str, Any]) -> bool:
    found = [value for key, value in batch.items() if key.endswith("attention_mask") and isinstance(value, Tensor)]
    return bool(found) and all(value.dim() == 2 and not value.is_meta and bool(value.all()) for value in found)


def _without_mask(ignores: Callable[..., bool]) -> Callable[..., bool]:
    return lambda padding_mask, *args, **kwargs: ignores(None, *args, **kwargs)
