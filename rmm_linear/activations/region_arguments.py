"""The arguments of a region's call: what a node keeps of them, and what its replay gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from rmm_linear.activations.region_slices import Cut, Part, Place, Shape

Arguments = dict[int | str, Any]  # by position or name
# A leaf of the output, or below 0 what the sink gets in later calls; the key or value of a call that fills a cache;
# what the sink gets in its first call.
Which = int | tuple[int, int] | None
PARTS = "self_attention_cache", "cross_attention_cache"  # of a cache that is two, of which a module fills one


class Stop(BaseException):
    """Leaves a module's forward at the sink; code that catches exceptions does not catch it."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


def is_cache(value: object) -> bool:
    """Say whether an argument is a cache of keys and values, which a second run would fill again."""
    return hasattr(value, "update") and hasattr(value, "get_seq_length")


def parts_of(cache: Any) -> list[Any]:
    """Return the two caches that one consists of, or it."""
    return [one for name in PARTS if (one := getattr(cache, name, None)) is not None] or [cache]


def leaves_of(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of arguments or outputs, caches as they are."""
    return tree_flatten(tree, is_leaf=is_cache)


def shapes_of(arguments: Arguments) -> dict[Place, Shape]:
    """Return the shapes of the tensors in arguments."""
    leaves = {(key, i): leaf for key, value in arguments.items() for i, leaf in enumerate(leaves_of(value)[0])}
    return {place: leaf.shape for place, leaf in leaves.items() if isinstance(leaf, Tensor)}


def narrowed(arguments: Arguments, part: Part, cut: Cut) -> Arguments:
    made: Arguments = {}
    for key, value in arguments.items():
        leaves, spec = leaves_of(value)
        leaves = [
            part.of(one, cut.leaves.get((key, i), 0)) if isinstance(one, Tensor) else one
            for i, one in enumerate(leaves)
        ]
        made[key] = tree_unflatten(leaves, spec)
    return made


def positional(arguments: Arguments) -> list[Any]:
    """Return the arguments that are given by position."""
    return [value for key, value in arguments.items() if isinstance(key, int)]


def named(arguments: Arguments) -> dict[str, Any]:
    """Return those that are given by name."""
    return {key: value for key, value in arguments.items() if isinstance(key, str)}


class HeldArguments:
    """The arguments of a call without their tensors, which a node saves."""

    def __init__(self, arguments: Arguments, free: frozenset[int | str], which: Which, cut: Cut) -> None:
        """Take them apart. free: Arguments whose values are not kept."""
        self.which, self.values, self.tensors = which, dict[int | str, tuple[list[Any], Any]](), list[Tensor]()
        for key, argument in arguments.items():
            leaves, spec = leaves_of(argument)
            held: list[Any] = []
            for i, leaf in enumerate(leaves):
                ratio = cut.leaves.get((key, i), 0)
                if not isinstance(leaf, Tensor):
                    held.append(_HELD_CACHE if is_cache(leaf) else leaf)
                elif key in free:
                    held.append(_AbsentTensor(leaf.shape, leaf.dtype, leaf.device, ratio))
                else:
                    held.append(_HeldTensor(len(self.tensors), leaf.requires_grad, ratio))
                    self.tensors.append(leaf)
            self.values[key] = held, spec

    def release(self) -> list[Tensor]:
        tensors, self.tensors = self.tensors, []
        return tensors

    def given(self, tensors: Sequence[Tensor], part: Part) -> tuple[Arguments, list[Tensor], list[int]]:
        """Return the arguments of some of the sequences; the tensors that need a gradient, and their ratios."""
        arguments, reached, ratios = Arguments(), list[Tensor](), list[int]()
        for key, (held, spec) in self.values.items():
            leaves = list(held)
            for i, one in enumerate(held):
                if one is _HELD_CACHE:
                    leaves[i] = _Refill(self.which) if isinstance(self.which, tuple) else None
                elif isinstance(one, _AbsentTensor):
                    leaves[i] = part.of(one.tensor(), one.ratio)
                elif isinstance(one, _HeldTensor):
                    leaves[i] = part.of(tensors[one.place].detach(), one.ratio)
                    if one.needs_gradient:
                        reached.append(leaves[i].requires_grad_())
                        ratios.append(one.ratio)
            arguments[key] = tree_unflatten(leaves, spec)
        return arguments, reached, ratios


class _Refill:
    """Stands for an empty cache when a module runs again for what it has put there."""

    def __init__(self, which: tuple[int, int]) -> None:
        self.which, self.count, self.is_updated = which, 0, {}
        self.self_attention_cache = self.cross_attention_cache = self

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.count == self.which[0]:
            raise Stop((key, value)[self.which[1]])
        self.count += 1
        return key, value

    def get_seq_length(self, *args: Any) -> int:
        return 0


@dataclass(frozen=True)
class _HeldTensor:
    """A tensor among arguments, by its place among those that are saved."""

    place: int
    needs_gradient: bool
    ratio: int


@dataclass(frozen=True)
class _AbsentTensor:
    """A tensor that only sources read: NaN, so that a use of it is seen."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    ratio: int

    def tensor(self) -> Tensor:
        return torch.full((), torch.nan, dtype=self.dtype, device=self.device).expand(self.shape)


_HELD_CACHE = object()
