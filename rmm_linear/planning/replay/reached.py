"""The leaves of a recorded step, in a fixed order, and its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rmm_linear._support.saved_graph import graph_leaves


def leaves_behind(results: Sequence[Tensor], own: Iterable[Tensor] = ()) -> list[Tensor]:
    """Return the tensors that get a gradient from results that need it, other than ``own``, those a step was given."""
    found = [leaf for leaf in results if leaf.is_leaf and leaf.requires_grad]  # returned as they are, without a node
    found += graph_leaves(results)
    known = {id(leaf) for leaf in own}
    return [leaf for key, leaf in {id(leaf): leaf for leaf in found}.items() if key not in known]


def pull_back(
    results: Sequence[tuple[Tensor, Tensor]],
    wanted: Sequence[Tensor],
    parameters: Sequence[Tensor],
    totals: Sequence[Tensor | None],
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Run the backward pass of one step, and use up its graph.

    The parameters' totals enter the graph as the gradient of one more use of each of them, later than the step's own:
    autograd then sums in the order in which it would for the whole chain, and rounds alike.
    """
    if not results or not (wanted or parameters):
        return [None] * len(wanted), list(totals)
    with torch.enable_grad():
        roots = [(p[...], total) for p, total in zip(parameters, totals, strict=True) if total is not None]
    ends, starts = zip(*results, *roots, strict=True)
    found = torch.autograd.grad(ends, [*wanted, *parameters], starts, allow_unused=True)
    return list(found[: len(wanted)]), list(found[len(wanted) :])
