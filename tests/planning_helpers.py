"""Chains with all that may go wrong in them, the plain loop that a sweep replaces, and a store that is watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Any]


class Reaction(nn.Module):
    """A step that uses a parameter twice, with noise, dropout and running statistics.

    The state has floating point numbers, a clock, a counter, and a tensor that is handed on as it is.
    """

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear, self.dropout, self.norm = nn.Linear(width, width), nn.Dropout(0.2), nn.BatchNorm1d(width)

    def forward(self, number: int, state: State) -> State:
        (u, clock), force = state["moving"], state["force"]
        middle = u + 0.05 * (torch.tanh(self.linear(u)) + force)
        u = u + 0.1 * (torch.tanh(self.linear(middle)) + force) + 0.01 * number * torch.randn_like(u)
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
    """A store that writes down what is done to it, and can do something else at its third put, get or drop."""

    def __init__(self, what: str = "", fault: Callable[[Any], Any] = lambda found: found) -> None:
        self.held: dict[str, list[Tensor]] = {}
        self.done: list[tuple[str, int]] = []
        self.most = 0
        self.what, self.fault = what, fault

    def called(self, what: str, key: str, found: Any = None) -> Any:
        self.done.append((what, number_of(key)))
        return self.fault(found) if what == self.what and self.count(what) == 3 else found

    def count(self, what: str) -> int:
        return sum(name == what for name, _ in self.done)

    def put(self, key: str, tensors: list[Tensor]) -> None:
        assert key not in self.held
        self.held[key] = [tensor.clone() for tensor in tensors]
        self.most = max(self.most, len(self.held))
        self.called("put", key)

    def get(self, key: str) -> list[Tensor]:
        return self.called("get", key, [tensor.clone() for tensor in self.held[key]])

    def drop(self, key: str) -> None:
        self.called("drop", key)
        del self.held[key]


def number_of(key: str) -> int:
    """Return the step that a key is about; -1 for the trial that measures a store."""
    last = key.rpartition("-")[2]
    return int(last) if last.isdigit() else -1
