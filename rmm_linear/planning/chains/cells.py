"""Call cells, find their parameters, and record one step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

Cell = Callable[[Any, Any], tuple[Any, Any]]


def adapted(cell: Any, state: Any, x: Tensor) -> tuple[Any, Any]:
    """Turn PyTorch's cells into functions ``(x_t, state) -> (output, state)``; others are returned as they are."""
    if isinstance(cell, nn.RNNBase):
        name = type(cell).__name__
        raise TypeError(
            f"cell must run one step, got nn.{name}, which runs all of them at once. Use nn.{name}Cell with the "
            "weights of a layer: its weight_ih is weight_ih_l0, and so on."
        )
    if not callable(cell):
        raise TypeError(f"cell must be callable as cell(x_t, state) -> (output, state), got {cell!r}.")
    if not isinstance(cell, nn.RNNCellBase):
        return cell, state
    is_lstm = isinstance(cell, nn.LSTMCell)
    if state is None:
        zeros = torch.zeros(*x.shape[:-1], cell.hidden_size, dtype=x.dtype, device=x.device)
        state = (zeros, zeros.clone()) if is_lstm else zeros
    if is_lstm:
        if not isinstance(state, list | tuple) or len(state) != 2 or not all(isinstance(one, Tensor) for one in state):
            got = f"{type(state).__name__} of {len(state)}" if isinstance(state, list | tuple) else type(state).__name__
            raise TypeError(f"state of nn.LSTMCell must be a pair of tensors (h, c), or None for zeros, got {got}.")
        state = tuple(state)
    elif not isinstance(state, Tensor):
        raise TypeError(
            f"state of nn.{type(cell).__name__} must be a tensor h, or None for zeros, got {type(state).__name__}."
        )
    return functools.partial(_lstm_step if is_lstm else _rnn_step, cell), state


def _lstm_step(cell: nn.LSTMCell, x: Tensor, state: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    h, c = cell(x, state)
    return h, (h, c)


def _rnn_step(cell: nn.Module, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    h = cell(x, state)
    return h, h


def module_of(cell: Any) -> nn.Module | None:
    """Return the module that a cell is, is a method of, or is a partial call of; None for other functions."""
    while isinstance(cell, functools.partial):
        inside = [part for part in (cell.func, *cell.args) if module_of(part) is not None]
        cell = inside[0] if len(inside) == 1 else None
    if inspect.ismethod(cell):
        cell = cell.__self__
    return cell if isinstance(cell, nn.Module) else None


@dataclass
class RecordedCell:
    """One step with its graph: leaves of what it read, detached, of its output, and of the new state."""

    inputs: list[Any]
    state: list[Any]
    outputs: list[Any]
    new: list[Any]

    @property
    def given(self) -> list[Any]:
        return [*self.inputs, *self.state]

    @property
    def results(self) -> list[Tensor]:
        """Tensors that depend on what needs a gradient."""
        return [leaf for leaf in (*self.outputs, *self.new) if isinstance(leaf, Tensor) and leaf.requires_grad]


class Step:
    """A cell on lists of leaves in place of trees."""

    def __init__(self, cell: Cell, inputs: TreeSpec, state: TreeSpec) -> None:
        """Take a cell and the structures of what it reads; that of its output is known after the first step."""
        self.cell, self.inputs, self.state = cell, inputs, state
        self._outputs: TreeSpec | None = None

    def __call__(self, x: Sequence[Any], state: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run one step; return the leaves of its output and of the new state."""
        found = self.cell(tree_unflatten(list(x), self.inputs), tree_unflatten(list(state), self.state))
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(f"cell must return (output, state), got {type(found).__name__}. None is an output too.")
        outputs, spec = tree_flatten(found[0])
        new, new_spec = tree_flatten(found[1])
        if new_spec != self.state or (self._outputs or spec) != spec:
            what, was, now = (
                ("state", self.state, new_spec) if new_spec != self.state else ("output", self._outputs, spec)
            )
            raise ValueError(f"cell must return a {what} of one structure at every step, got {now} after {was}.")
        self._outputs = spec
        return outputs, new

    def output_tree(self, leaves: Sequence[Any]) -> Any:
        """Return leaves in the structure of the output, which a step must have shown."""
        return tree_unflatten(list(leaves), self._outputs or tree_flatten(None)[1])

    def state_tree(self, leaves: Sequence[Any]) -> Any:
        return tree_unflatten(list(leaves), self.state)

    def record(self, x: Sequence[Any], state: Sequence[Any], needs: Sequence[bool]) -> RecordedCell:
        leaves = [
            leaf.detach().requires_grad_(need) if isinstance(leaf, Tensor) else leaf
            for leaf, need in zip((*x, *state), needs, strict=True)
        ]
        x, state = leaves[: len(x)], leaves[len(x) :]
        with torch.enable_grad():
            return RecordedCell(x, state, *self(x, state))
