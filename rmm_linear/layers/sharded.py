"""Tensor parallel modules: every rank runs its own part, a plain tensor, and codes its own input.

``DTensor`` says how tensors lie on the ranks of a mesh. A module is run with the local tensors where that is what its
distributed form computes, and its output is labelled as the distributed form's:

    input                    weight       output             gradient of the input, of the weight
    whole                    rows         its columns        a summand, rows             column-wise parallel
    columns                  columns      a summand          columns, columns            row-wise parallel
    some tokens              whole        some tokens        some tokens, a summand      sequence parallel
    whole                    whole        whole              whole, whole                the same on all ranks

So outputs are the distributed form's to the bit. Every other layout stays exact. What the ranks compute alike they must
draw alike, see :mod:`rmm_linear.context.ranks`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmm_linear._support.distributed import is_dtensor, local_view

logger = logging.getLogger(__name__)


class Layout(NamedTuple):
    """Placements on each dimension of a mesh: of the output, and of gradients."""

    output: list[Any]
    of_input: list[Any]
    of_weight: list[Any]
    bias: list[Any]
    of_bias: list[Any]


@torch.compiler.assume_constant_result
def say_exact() -> bool:
    """Warn, while code is compiled, that tensor parallel modules are exact in it; the graph has nothing of it."""
    return _say_exact()


@functools.cache
def _say_exact() -> bool:
    logger.warning(
        "Tensor parallel linear layers and norms are exact in compiled code, whose operators draw other numbers on "
        "every rank: they save what they do without rmm_linear. Train without torch.compile to compress them."
    )
    return True


def linear_layout(input: Any, weight: Any, bias: Any) -> Layout | None:
    """Return how a linear layer of distributed tensors lies on the ranks; None for layouts that stay exact."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if not is_dtensor(input) or input.device_mesh != weight.device_mesh or not (bias is None or is_dtensor(bias)):
        return None
    last, found = input.dim() - 1, Layout([], [], [], [], [])
    for x, w in zip(input.placements, weight.placements, strict=True):
        if type(w) is Shard and w.dim == 0 and x.is_replicate():
            row = Shard(last), Partial(), w, Shard(0), Shard(0)
        elif type(w) is Shard and w.dim == 1 and type(x) is Shard and x.dim == last:
            row = Partial(), x, w, Partial(), Replicate()
        elif w.is_replicate() and type(x) is Shard and x.dim != last:
            row = x, x, Partial(), Replicate(), Partial()
        elif w.is_replicate() and x.is_replicate():
            row = (Replicate(),) * 5
        else:
            return None
        for places, one in zip(found, row, strict=True):
            places.append(one)
    return found


def sharded_linear(
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor], layout: Layout, input: Any, weight: Any, bias: Any
) -> Tensor:
    """Apply a linear layer of local tensors to distributed ones, of the layout that :func:`linear_layout` returns."""
    own = None
    if bias is not None:
        added = bias if list(bias.placements) == layout.bias else bias.redistribute(placements=layout.bias)
        own = added.to_local(grad_placements=layout.of_bias)
    x, w = local_view(input, layout.of_input), weight.to_local(grad_placements=layout.of_weight)
    return _whole(run(x, w, own), input, layout.output, (*input.shape[:-1], weight.shape[0]))


def rows_layout(input: Any, tensors: Sequence[Any], dims: int) -> tuple[list[Any], list[Any]] | None:
    """Return placements of the output and of the parameters' gradients; a module's rows have ``dims`` dimensions."""
    from torch.distributed.tensor import Partial, Replicate

    whole = all(is_dtensor(one) and all(place.is_replicate() for place in one.placements) for one in tensors)
    kept = [one.is_replicate() or (one.is_shard() and one.dim < input.dim() - dims) for one in input.placements]
    if not whole or not all(kept):
        return None
    return list(input.placements), [Replicate() if one.is_replicate() else Partial() for one in input.placements]


def sharded_rows(run: Callable[[Tensor, list[Tensor]], Tensor], input: Any, tensors: Sequence[Any], layout: Any) -> Any:
    """Apply a module of rows to local tensors: ``run`` gets those of the input and of the parameters."""
    output, of_parameters = layout
    own = [one.to_local(grad_placements=of_parameters) for one in tensors]
    return _whole(run(local_view(input, output), own), input, output, tuple(input.shape))


def _whole(local: Tensor, input: Any, placements: list[Any], shape: tuple[int, ...]) -> Tensor:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()  # parts need not be equal, so the whole's size is given
    return DTensor.from_local(
        local, input.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
