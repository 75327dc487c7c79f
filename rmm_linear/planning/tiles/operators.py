"""Look at the operators that a module runs: whether one of them mixes rows, or draws numbers for several rows at once.

Rows are followed by their number: the two leading dimensions of the input are primes that no other dimension has, and
a tensor has rows if both are among its dimensions, or their product is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META_LEAD = (10_007, 100_003)  # primes, larger than widths, and in no product of them


class Mixed(Exception):
    """A module's rows depend on one another, or it cannot run in slices for another reason of its own."""


class SteadyNumbers(TorchDispatchMode):
    """Make random numbers constant, and dropout nothing, so that slices can be compared with the whole."""

    def __init__(self, lead: Sequence[int]) -> None:
        """Begin; ``lead`` are the dimensions of the rows."""
        super().__init__()
        self.lead = tuple(lead)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if "attention" in name:
            raise Mixed(f"it runs {name}")
        if torch.Tag.nondeterministic_seeded not in func.tags:
            output = func(*args, **kwargs)
            if name == "_softmax" and output.shape[args[1]] in {self.lead[-1], math.prod(self.lead)} - {1}:
                raise Mixed("it runs a softmax over positions")
            return output
        if name in ("native_dropout", "_fused_dropout"):
            check_random(args[0].shape, self.lead)
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        output = func(*args, **kwargs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                check_random(leaf.shape, self.lead)
                if leaf.is_floating_point() or leaf.dtype == torch.bool:
                    leaf.fill_(1)
        return output


def check_random(shape: Sequence[int], lead: Sequence[int]) -> None:
    """Raise unless random numbers of some shape are drawn for every row by itself."""
    if not _has_rows(shape, lead):
        raise Mixed("it draws random numbers that several positions share")


def _has_rows(shape: Sequence[int], lead: Sequence[int]) -> bool:
    return math.prod(lead) in shape or all(size in shape for size in lead)


class Names(TorchDispatchMode):
    """Note the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Check that no operator mixes rows, of tensors without values."""

    def __init__(self, buffers: Iterable[Tensor] = ()) -> None:
        """Begin; ``buffers`` may not be written into."""
        super().__init__()
        self.lead, self.buffers = META_LEAD, {id(one) for one in buffers}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        with_rows = [one for one in given if self._has_rows(one)]
        if torch.Tag.nondeterministic_seeded in func.tags or name in ("native_dropout", "rand", "randn"):
            output = func(*args, **kwargs)
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor):
                    check_random(leaf.shape, self.lead)
            return output
        if func._schema.is_mutable and any(id(one) in self.buffers for one in given[:1]):
            raise Mixed("it changes its buffers")
        if with_rows and not self._is_known(func, args, kwargs, with_rows):
            raise Mixed(f"it runs {name}, which may mix positions")
        output = func(*args, **kwargs)
        if with_rows:
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            if not all(map(self._has_rows, leaves)):
                raise Mixed(f"it runs {name}, which divides or joins positions")
        return output

    def _places(self, tensor: Tensor) -> list[int]:
        return [n for n, size in enumerate(tensor.shape) if size in (*self.lead, math.prod(self.lead))]

    def _has_rows(self, tensor: Tensor) -> bool:
        """Say whether a tensor has rows, and raise where it has some of their dimensions alone, or one twice."""
        sizes = sorted(tensor.shape[n] for n in self._places(tensor))
        if sizes and sizes not in (sorted(self.lead), [math.prod(self.lead)]):
            raise Mixed(f"it makes a tensor of shape {tuple(tensor.shape)}, which joins positions")
        return bool(sizes)

    def _is_known(self, func: Any, args: Any, kwargs: dict[str, Any], with_rows: Sequence[Tensor]) -> bool:
        name = func.overloadpacket.__name__
        if name in _PRODUCTS:
            first, second = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
            first_places, second_places = self._places(first), self._places(second)
            return first.dim() - 1 not in first_places and second.dim() - 2 not in second_places
        if name in _OVER_LAST:
            return with_rows[0].dim() - len(args[1]) > max(self._places(with_rows[0]))
        if name in _OVER_DIMS:
            return self._is_beside(_dims(func, args, kwargs), with_rows[0])
        return func.is_view or torch.Tag.pointwise in func.tags or name in _COPIES

    def _is_beside(self, dims: Sequence[int] | None, tensor: Tensor) -> bool:
        """Say whether the dimensions that an operator goes over are no rows."""
        return bool(dims) and not {dim % tensor.dim() for dim in dims} & {*self._places(tensor)}


def _dims(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[int] | None:
    """Return the dimensions that an operator goes over; None for all."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.name in ("dim", "dims"):
            default = kwargs.get(argument.name, argument.default_value)
            found = args[number] if number < len(args) else default
            return [found] if isinstance(found, int) else found
    return None


_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
_OVER_LAST = {"native_layer_norm", "_fused_rms_norm"}
_OVER_DIMS = {
    *("mean", "sum", "amax", "amin", "var", "std", "var_mean", "linalg_vector_norm", "norm", "prod", "logsumexp"),
    *("_softmax", "_log_softmax", "cumsum", "any", "all", "argmax", "topk", "sort", "glu"),
    *("cat", "stack", "gather", "scatter", "index_select", "flip", "roll"),
}
_COPIES = {
    *("clone", "_to_copy", "copy_", "contiguous", "empty_like", "zeros_like", "ones_like", "full_like", "new_empty"),
    *("new_zeros", "new_ones", "new_full", "fill_", "zero_", "_unsafe_view", "detach", "alias", "lift_fresh"),
    *("masked_fill", "masked_fill_", "hardtanh", "where", "scalar_tensor"),
}
