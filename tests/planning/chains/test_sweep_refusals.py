"""What sweeps refuse, and what they say: arguments, steps, second backward passes, tensors changed in place."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from planning_helpers import Recording
from torch import Tensor

from rmm_linear.planning import open_store, sweep


def halve(number: int, u: Tensor) -> Tensor:
    return u * 0.5 + 0.1 * torch.sin(u)


def initial() -> Tensor:
    return torch.ones(3, requires_grad=True)


@pytest.mark.parametrize(
    ("steps", "options", "error", "message"),
    [
        (2.0, {"slots": 1}, TypeError, r"steps must be a number, or a condition .* got 2\.0"),
        (True, {"slots": 1}, TypeError, "steps must be a number"),
        (-1, {"slots": 1}, ValueError, "at least 0, got -1"),
        (9, {}, TypeError, "slots must be a positive integer, got None"),
        (9, {"slots": 0}, ValueError, "slots must be at least 1, got 0"),
        (9, {"slots": 1, "length": 9}, ValueError, "length is for a condition, got steps=9 and length=9"),
        (
            lambda i, u: i < 9,
            {"slots": 1, "store": "cpu", "interval": 3, "length": 9},
            ValueError,
            r'length is what interval="sqrt" takes the root of, got interval=3 and length=9\. Leave length out',
        ),
        (lambda i, u: i < 9, {"slots": 1, "store": "cpu", "length": 9}, ValueError, "got interval='auto' and length=9"),
        (9, {"slots": 1, "interval": 3}, ValueError, "got store=None. Give a store"),
        (9, {"slots": 1, "interval": "sqrt"}, ValueError, "got store=None. Give a store"),
        (9, {"slots": 1, "interval": "root", "store": "cpu"}, ValueError, '"auto" or "sqrt", got \'root\''),
        (9, {"slots": 1, "interval": 0, "store": "cpu"}, ValueError, "interval must be at least 1, got 0"),
        (9, {"slots": 1, "interval": 3, "store": 7}, TypeError, 'a folder, "cpu", or an object .* got 7'),
        (lambda i, u: i < 9, {"slots": 1}, ValueError, "length is not known needs a store and slots, got no store"),
        (lambda i, u: i < 9, {"slots": 1, "store": "cpu", "interval": "sqrt"}, ValueError, "Give length="),
        (
            lambda i, u: i < 9,
            {"store": "cpu", "levels": [("ram", 1), ("disk", 2)]},
            ValueError,
            "needs a store and slots, got levels",
        ),
        (9, {"levels": [("ram", 1), ("disk", 2)]}, ValueError, "levels needs a store"),
        (
            9,
            {"slots": 2, "store": "cpu", "levels": [("ram", 1), ("disk", 2)]},
            ValueError,
            "slots=2 and interval='auto'",
        ),
        (9, {"store": "cpu", "levels": [("disk", 2), ("ram", 1)]}, ValueError, r"levels must be \[\(\"ram\", slots\)"),
        (9, {"store": "cpu", "levels": [("ram", 1), ("disk", 2, 1.0)]}, ValueError, "levels must be"),
        (9, {"store": "cpu", "levels": [("ram", 1), ("disk", 2, 1.0, -1)]}, ValueError, "at least 0, got"),
        (
            9,
            {"store": "cpu", "levels": [("ram", 1), ("disk", 0)]},
            ValueError,
            "the slots of level disk must be at least 1",
        ),
    ],
    ids=lambda value: "condition" if callable(value) and not isinstance(value, type) else str(value),
)
def test_arguments_that_make_no_sense(steps: Any, options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        sweep(halve, initial(), steps, **options)


@pytest.mark.parametrize("state", [3.0, (), {"u": torch.ones(1), "t": 0.5}, torch.ones(2).to_sparse()], ids=str)
def test_a_state_that_is_no_tensor(state: Any) -> None:
    with pytest.raises(TypeError, match=r"A state must .* in the initial state"):
        sweep(lambda i, state: state, state, 3, slots=1)


def test_a_step_that_returns_another_structure() -> None:
    with pytest.raises(TypeError, match=r"structure that it got, .* but step 2 returned"):
        sweep(lambda i, u: u * 2 if i < 2 else (u * 2,), initial(), 5, slots=1)
    with pytest.raises(TypeError, match="in what step 0 returned"):
        sweep(lambda i, u: None, initial(), 5, slots=1)


@pytest.mark.parametrize("number", [0, 3])
def test_a_step_that_changes_its_state_in_place(number: int) -> None:
    def step(i: int, u: Tensor) -> Tensor:
        return u.mul_(0.5) if i == number else torch.sin(u)

    with pytest.raises(RuntimeError, match=f"step {number} changed the old one in place.* trailing underscore"):
        sweep(step, torch.ones(3), 5, slots=2)
    with pytest.raises(RuntimeError, match=r"in.place"):
        sweep(step, initial(), 5, slots=2)


def test_a_state_that_somebody_else_changes() -> None:
    seen: list[Tensor] = []

    def step(number: int, u: Tensor) -> Tensor:
        seen.append(u)
        return torch.sin(u)

    final = sweep(step, initial(), 9, slots=4)
    for state in seen[1:-1]:
        state.detach().add_(1)
    with pytest.raises(RuntimeError, match=r"The state before step \d must stay as it was .* Clone"):
        final.sum().backward()


def test_a_second_derivative() -> None:
    """``create_graph`` alone is no reason to fail: others' second derivatives may be wanted."""
    u = initial()
    (expected,) = torch.autograd.grad(sweep(halve, u, 5, slots=2).sum(), u)
    (gradient,) = torch.autograd.grad(sweep(halve, u, 5, slots=2).sum(), u, create_graph=True)
    assert torch.equal(gradient, expected)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        (gradient.sum() + u.sum()).backward()


def test_the_package_of_schedules_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "checkpoint_schedules", None)
    with pytest.raises(ImportError, match=r"checkpoint-schedules, which is not installed\. Run pip install .*planning"):
        sweep(halve, initial(), 5, slots=2)
    with torch.no_grad():
        assert sweep(halve, initial(), 5, slots=2).shape == (3,)


def test_open_store_takes_what_a_user_calls_a_store(tmp_path: Any) -> None:
    store = Recording()
    assert open_store(store) is store
    for one in (None, "cpu", tmp_path, str(tmp_path)):
        opened: Any = open_store(one)
        opened.put("a-1", [torch.arange(3)])
        assert torch.equal(opened.get("a-1")[0], torch.arange(3))
        opened.drop("a-1")
        opened.close()
    assert list(tmp_path.iterdir()) == []
