"""Forward passes that wait for their backward pass: what activation checkpointing's recomputation was given before.

A recomputation runs inside of the backward pass, without the modules around it. So every call of a layer leaves behind
what it was given, and the recomputation looks for it by the layer and the number of its rows.
"""

from __future__ import annotations

from collections import deque

import torch

from rmm_linear.given import AttentionMask, Given

_MOST = 64  # calls remembered until a backward pass; who never runs one must not fill the memory


class Waiting:
    """What calls of layers were given, by the layer's number."""

    def __init__(self) -> None:
        """Remember nothing."""
        self._calls: dict[int, deque[tuple[int, Given]]] = {}

    def add(self, index: int, tokens: int, given: Given) -> None:
        """Remember a call.

        Args:
            index: Number of the layer.
            tokens: N.
            given: What it was given, fitting N.
        """
        self._calls.setdefault(index, deque(maxlen=_MOST)).append((tokens, given))

    def find(self, index: int, tokens: int, name: str, masked: bool) -> Given:
        """Return what the call was given that is now recomputed.

        Several may fit, as when two forward passes come before one backward pass. A mask that is not the call's own
        would bias the gradient; ids and numbers only decide its noise, and are left out where they could be others'.

        Args:
            index: Number of the layer.
            tokens: N.
            name: Name of the layer.
            masked: Whether the layer wants the mask.

        Returns:
            What all fitting calls have in common.

        Raises:
            RuntimeError: If they have different masks.
        """
        fitting = [given for rows, given in self._calls.get(index, ()) if rows == tokens]
        if not fitting:
            return Given()
        first = fitting[0]
        if masked and any(not _same(given.mask, first.mask) for given in fitting):
            raise RuntimeError(
                f"Activation checkpointing recomputes {name}, and several forward passes with different "
                "attention masks wait for their backward pass: the layer cannot tell which is its own. Run backward "
                "after every forward, or convert with mask_padding=False."
            )
        ids = first.input_ids if all(given.input_ids is first.input_ids for given in fitting) else None
        numbers = first.sample_index if all(given.sample_index is first.sample_index for given in fitting) else None
        return Given(first.mask, ids, numbers)

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()


def _same(first: AttentionMask | None, second: AttentionMask | None) -> bool:
    if first is None or second is None or first is second:
        return first is second
    return torch.equal(first.flat, second.flat)
