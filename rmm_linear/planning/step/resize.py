"""Make batches of another number of sequences, or of sequences of another length, out of one batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from rmm_linear.memory.inputs import sequences_in

_POSITIONS = ("position_ids", "cache_position")  # ends of the names of tensors that number the tokens
_PACKED = ("cu_seq_lens", "cu_seqlens", "max_length_")  # beginnings of names, where several texts share a row
_TABLES = (  # names of embeddings that have a row per position
    *("position_embeddings", "position_embedding", "position_embeds", "pos_embed", "pos_emb"),
    *("embed_positions", "positions_embed", "wpe"),
)


def resized(example: Any, count: int) -> Any:
    """Make a batch of another number of sequences, by repeating those that are there."""
    have = sequences_of(example)

    def resize(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != have:
            return tensor
        return tensor[torch.arange(count, device=tensor.device) % have]

    return tree_map_only(Tensor, resize, example)


def sequences_of(example: Any) -> int:
    """Return the number of sequences of a batch; a ValueError if no other batch can be made of it."""
    if callable(example):
        raise ValueError(
            "Batches of other sizes are made of the example, which a function as the example does not allow. Pass the "
            "batch: a mapping, a sequence of tensors, or a tensor."
        )
    count = sequences_in(dict(example) if isinstance(example, Mapping) else example)
    if not count:
        raise ValueError(
            f"example must be a batch with tensors of one row or more, got {type(example).__name__} without any. Pass "
            "a training batch."
        )
    return count


def lengthened(example: Any, length: int) -> Any:
    """Make a batch of sequences of another length, by repeating every token, or leaving some out.

    Token ids, labels and masks of shape (B, T), embeddings (B, T, H) and masks (B, 1, T, T) follow the sequence;
    tensors of another length stay. Padding keeps its share. Position ids count on from where a text begins.
    """
    count, have = sequences_of(example), length_of(example)

    def resize(name: str, tensor: Tensor) -> Tensor:
        if name.startswith(_PACKED):
            raise ValueError(
                f"Sequences of another length are made of rows with one text each, got {name!r}, by which texts share "
                "a row. Leave it out."
            )
        if name.endswith(_POSITIONS) and tensor.dim() and tensor.shape[-1] == have:
            return _positions(tensor, length)
        if tensor.dim() < 2 or len(tensor) not in (1, count):
            return tensor
        is_mask = "mask" in name or not tensor.is_floating_point()
        if tensor.dim() > 3 and not is_mask:
            raise ValueError(
                f"Sequences of another length are made of tokens, embeddings and masks, got {name or 'a tensor'} of "
                f"shape {tuple(tensor.shape)}. Pass a batch without it, or batches of the length itself to fit."
            )
        along = [place for place in range(1, tensor.dim()) if tensor.shape[place] == have]
        for place in along if is_mask else along[: along[:1] == [1]]:
            tensor = tensor.index_select(place, torch.arange(length, device=tensor.device) * have // length)
        return tensor

    if isinstance(example, Mapping):
        return {
            key: tree_map_only(Tensor, lambda tensor, key=key: resize(str(key), tensor), value)
            for key, value in example.items()
        }
    return tree_map_only(Tensor, lambda tensor: resize("", tensor), example)


def length_of(example: Any) -> int:
    """Return the length of the sequences of a batch: what most tensors (B, T) and (B, T, H) have; else a ValueError."""
    count = sequences_of(example)
    leaves = tree_leaves(dict(example) if isinstance(example, Mapping) else example)
    found = Counter(
        leaf.shape[1]
        for leaf in leaves
        if isinstance(leaf, Tensor) and len(leaf.shape) == 2 + leaf.is_floating_point() and len(leaf) == count
    )
    if not found:
        raise ValueError(
            "example must have sequences, integers of shape (B, T) or embeddings (B, T, H), got none. Only then can it "
            "be made longer."
        )
    return found.most_common(1)[0][0]


def _positions(given: Tensor, length: int) -> Tensor:
    """Count on from where a text begins; values on the meta device are not known."""
    have = given.shape[-1]
    places = torch.arange(length, device=given.device)
    if given.is_meta:
        return places.to(given.dtype).expand(*given.shape[:-1], length)
    source = places * have // length
    begins = torch.ones_like(given, dtype=torch.bool)
    begins[..., 1:] = given[..., 1:] != given[..., :-1] + 1
    first = begins[..., source]
    first[..., 1:] &= source[1:] != source[:-1]
    begin = torch.where(first, places, 0).cummax(-1).values
    return given.gather(-1, source[begin]) + (places - begin).to(given.dtype)


def usable_positions(model: nn.Module) -> int | None:
    """Return how long a sequence may be where a table of the model has a row per position; None without a table.

    A table is an embedding with a name such as "position_embeddings" or "wpe". Rows up to that of padding, and those of
    an offset, are not used: of RoBERTa's 514 rows, 512 are.
    """
    found = [
        table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1) - getattr(table, "offset", 0)
        for name, table in model.named_modules()
        if isinstance(table, nn.Embedding) and name.rpartition(".")[2] in _TABLES
    ]
    return min(found, default=None)
