"""What the tests of sweeps share: chains with all that may go wrong in them, and the plain loop beside a sweep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Any]


class Reaction(nn.Module):
    """A Runge-Kutta step, so that a parameter is used four times in it, with noise, dropout and running statistics.

    The state has floating point numbers, a clock, a counter, and a tensor that is handed on as it is.
    """

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear, self.dropout, self.norm = nn.Linear(width, width), nn.Dropout(0.2), nn.BatchNorm1d(width)

    def slope(self, u: Tensor, force: Tensor) -> Tensor:
        return torch.tanh(self.linear(u)) + force

    def forward(self, number: int, state: State) -> State:
        (u, clock), force = state["moving"], state["force"]
        first = self.slope(u, force)
        second = self.slope(u + 0.05 * first, force)
        third = self.slope(u + 0.05 * second, force)
        fourth = self.slope(u + 0.1 * third, force)
        u = u + 0.1 * (first + 2 * second + 2 * third + fourth) / 6 + 0.01 * number * torch.randn_like(u)
        moving = (self.norm(self.dropout(u)), clock + 0.1)
        return {"moving": moving, "force": force, "count": state["count"] + 1}


def start() -> State:
    """An initial state, of which two tensors need a gradient."""
    u, force = torch.randn(5, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    return {"moving": (u, torch.zeros(())), "force": force, "count": torch.zeros((), dtype=torch.long)}


def plain(step: Callable[[int, Any], Any], state: Any, steps: int) -> Any:
    """The loop that a sweep replaces."""
    for number in range(steps):
        state = step(number, state)
    return state


def differentiated(run: Callable[[Reaction, State], State]) -> dict[str, Tensor]:
    """Run a chain from the same start; return what it leaves, all gradients, and the random numbers that come next."""
    torch.manual_seed(7)
    step, state = Reaction(), start()
    final = run(step, state)
    found = {"u": final["moving"][0], "clock": final["moving"][1], "force": final["force"], "count": final["count"]}
    between = torch.rand(3)
    loss = (final["moving"][0] ** 2).sum() * final["moving"][1] + final["force"].sum()
    loss.backward()
    found |= {"grad u": state["moving"][0].grad, "grad force": state["force"].grad}
    found |= {f"grad {name}": parameter.grad for name, parameter in step.named_parameters()}
    found |= {name: buffer.clone() for name, buffer in step.named_buffers()}
    return {name: value.detach() for name, value in found.items()} | {"between": between, "after": torch.rand(3)}


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of what is not the same to the bit."""
    assert found.keys() == expected.keys()
    return [name for name, value in found.items() if not torch.equal(value, expected[name])]


class Recording:
    """A store that writes down what is done to it, and can be told to fail."""

    def __init__(self) -> None:
        self.kept: dict[str, list[Tensor]] = {}
        self.done: list[tuple[str, int]] = []
        self.most = 0

    def put(self, key: str, tensors: list[Tensor]) -> None:
        self.done.append(("put", number_of(key)))
        self.kept[key] = [tensor.clone() for tensor in tensors]
        self.most = max(self.most, len(self.kept))

    def get(self, key: str) -> list[Tensor]:
        self.done.append(("get", number_of(key)))
        return [tensor.clone() for tensor in self.kept[key]]

    def drop(self, key: str) -> None:
        self.done.append(("drop", number_of(key)))
        del self.kept[key]


def number_of(key: str) -> int:
    """The step that a key is about; -1 for the trial that measures a store."""
    last = key.rpartition("-")[2]
    return int(last) if last.isdigit() else -1
