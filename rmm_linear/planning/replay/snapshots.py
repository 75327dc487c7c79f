"""The state of a chain between two steps: its tensors, and snapshots from which the chain can start again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten


def flatten(state: Any, origin: str) -> tuple[list[Tensor], TreeSpec]:
    """Take a state apart.

    Args:
        state: A pytree (tuples, lists, dictionaries) of tensors.
        origin: Where it comes from, for the error.

    Returns:
        Its tensors, and the structure from which ``tree_unflatten`` makes it anew.

    Raises:
        TypeError: If a leaf is no dense tensor, or there is none.
    """
    leaves, structure = tree_flatten(state)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            got = f"a tensor of layout {leaf.layout}" if isinstance(leaf, Tensor) else repr(leaf)
            raise TypeError(
                f"A state must consist of dense tensors, got {got} in {origin}. Make a number torch.tensor(number), "
                "and let step capture what never changes."
            )
    if not leaves:
        raise TypeError(f"A state must have at least one tensor, got {state!r} in {origin}.")
    return leaves, structure


def differentiable(leaf: Tensor) -> bool:
    """Say whether gradients can flow through a tensor."""
    return leaf.is_floating_point() or leaf.is_complex()


def versions(leaves: Sequence[Tensor]) -> list[int]:
    """Return the version counters of tensors; those of inference mode have none."""
    return [0 if leaf.is_inference() else leaf._version for leaf in leaves]


@dataclass(frozen=True)
class Snapshot:
    """What a chain needs to start again before one of its steps.

    Attributes:
        leaves: The state's tensors, without what a view keeps alive beyond itself.
        strides: Strides that the tensors had: a product of a transposed matrix may round otherwise.
        versions: Version counters of the tensors when they were taken, or None where they cannot be changed.
        generators: States of the global random generators.
    """

    leaves: list[Tensor]
    strides: list[tuple[int, ...]]
    generators: list[Tensor]
    versions: list[int] | None = None

    @classmethod
    def of(cls, leaves: Sequence[Tensor], generators: list[Tensor]) -> Snapshot:
        """Take a snapshot of a state; a tensor is copied only where it is a small part of a larger storage."""
        kept = [_compact(leaf) for leaf in leaves]
        return cls(kept, [leaf.stride() for leaf in leaves], generators, versions(kept))

    def restored(self, number: int) -> list[Tensor]:
        """Return the tensors as the step saw them.

        Args:
            number: The step before which the snapshot was taken, for the error.

        Returns:
            The tensors, with their strides.

        Raises:
            RuntimeError: If somebody changed one in place.
        """
        if self.versions is not None and self.versions != versions(self.leaves):
            raise RuntimeError(
                f"The state before step {number} must stay as it was until the backward pass, but one of its tensors "
                "was changed in place. Clone what sweep returned, or what a step hands out, before changing it."
            )
        return [restrided(leaf, stride) for leaf, stride in zip(self.leaves, self.strides, strict=True)]


def _compact(leaf: Tensor) -> Tensor:
    used = leaf.numel() * leaf.element_size()
    return leaf.clone() if leaf.untyped_storage().nbytes() > used else leaf


def restrided(leaf: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a tensor with the strides that it once had."""
    if leaf.stride() == stride or 0 in stride:  # an expanded tensor has no room for a copy
        return leaf
    return torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device=leaf.device).copy_(leaf)
