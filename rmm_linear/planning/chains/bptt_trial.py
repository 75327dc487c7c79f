"""Try one step of a cell: measure its state and its graph, and find the parameters it reaches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rmm_linear._support.saved_graph import nodes_behind
from rmm_linear.memory.ledger import StorageKey, storage_key
from rmm_linear.planning.chains.bptt_plans import StepBytes
from rmm_linear.planning.chains.cells import RecordedCell, Step
from rmm_linear.planning.replay.reached import leaves_behind
from rmm_linear.planning.replay.replayed import Replayed, modules_behind
from rmm_linear.planning.replay.snapshots import is_differentiable

# Autocast keeps one copy of a parameter for all steps; its node keeps nothing, so that it may be run for each of them.
_CAST = "ToCopyBackward0"


@dataclass
class Trial:
    """Two recorded steps: the bytes that one saves, and the tensors other than inputs and state that get a gradient."""

    bytes: StepBytes
    parameters: list[Tensor]


def try_step(step: Step, x: Sequence[Any], state: Sequence[Any]) -> Trial:
    """Record a step twice, and leave random numbers and buffers as they were.

    What both graphs save is not a step's own: parameters, their copies under autocast, what the cell has captured.
    Where a step draws random numbers or changes buffers, every saved state and graph has the generators' states and the
    buffers' values with it.
    """
    replayed = Replayed(modules_behind(step.cell), (*x, *state), draws=True)
    with replayed.kept():
        before = replayed.seen()
        first, first_saved = _recorded(step, x, state)
        after = replayed.seen(before)
        changed = [] if after.generators is before.generators else list(after.generators)
        changed += [one.value for one in after.buffers.held if one not in before.buffers.held]
        # Copies, so that the state that the second one reads is its own.
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in state]
        second, saved = _recorded(step, x, copies)
        one, two = (set(nodes_behind(leaf.grad_fn for leaf in made.results)) for made in (first, second))
    captured = sorted(node.name() for node in one & two if not hasattr(node, "variable") and node.name() != _CAST)
    if captured:
        raise ValueError(
            f"cell must not capture the result of another computation that needs a gradient, got one of {captured[0]}. "
            "Give it to the cell as a part of the state that the cell returns unchanged, or detach it."
        )
    passed = _storages(second.state).keys() & _storages(second.new).keys()
    own = _storages(second.new) | _storages(second.outputs) | saved
    kept = own.keys() - passed - first_saved.keys() - _storages(x).keys()
    new = [leaf for leaf in second.new if isinstance(leaf, Tensor) and storage_key(leaf) not in passed]
    besides = sum(one.numel() * one.element_size() for one in changed)
    measured = StepBytes(
        state=sum(leaf.numel() * leaf.element_size() for leaf in new) + besides,
        graph=sum(own[key] for key in kept) + besides,
        plain=sum(own[key] for key in kept - _storages(second.state).keys()),
    )
    return Trial(measured, leaves_behind(second.results, second.given))


def check_reached(leaves: Iterable[Tensor], known: Iterable[Tensor], module: torch.nn.Module | None) -> None:
    """Raise if a step reaches a tensor whose gradient would be missing."""
    ids = {id(leaf) for leaf in known}
    for leaf in leaves:
        if id(leaf) in ids:
            continue
        got = f"got a tensor of shape {tuple(leaf.shape)} that needs a gradient and is none of"
        if module is None:
            raise ValueError(
                f"cell must reach the same parameters at every step as at the first one, {got} those. "
                "Give an nn.Module that has all of them."
            )
        raise ValueError(
            f"cell must find its parameters in its module, {got} {type(module).__name__}'s. Register it there, or give "
            "a function, if every step reaches it: lambda x, state: cell(x, state)."
        )


def _recorded(step: Step, x: Sequence[Any], state: Sequence[Any]) -> tuple[RecordedCell, dict[StorageKey, int]]:
    """Return a recorded step, and the storages that its graph saves."""
    saved: dict[StorageKey, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return step.record(x, state, [is_differentiable(leaf) for leaf in (*x, *state)]), saved


def _storages(leaves: Sequence[Any]) -> dict[StorageKey, int]:
    return {storage_key(leaf): leaf.untyped_storage().nbytes() for leaf in leaves if isinstance(leaf, Tensor)}
