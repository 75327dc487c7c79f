"""Operators run as plain functions, and as operators wherever something may see them as such."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

from rmm_linear.ops.dispatch import Operator


def double(x: Tensor, factor: int, other: Tensor | None) -> Tensor:
    """Return x · 2 · factor, plus the other."""
    return x * 2 * factor + (0 if other is None else other)


@pytest.fixture(scope="module")
def operator():
    found = Operator("double_of_the_tests", double)
    found.register_fake(lambda x, factor, other: torch.empty_like(x))
    return found


@pytest.fixture
def seen(operator, monkeypatch):
    """How often it ran as an operator."""
    calls, definition = [], operator.definition

    def spy(*arguments):
        calls.append(arguments)
        return definition(*arguments)

    monkeypatch.setattr(operator, "definition", spy)
    return calls


@pytest.mark.parametrize("x", [torch.ones(3), nn.Parameter(torch.ones(3))])
def test_plain_tensors_without_grad_mode_need_no_operator(operator, seen, x):
    with torch.no_grad():
        assert torch.equal(operator(x, 3, None), torch.full((3,), 6.0))
        assert torch.equal(operator(x, 3, x), torch.full((3,), 7.0))
    assert not seen


def test_grad_mode_needs_it(operator, seen):
    """The operator has no derivative; the function would have one."""
    result = operator(torch.ones(3, requires_grad=True), 3, None)
    assert len(seen) == 1
    with pytest.raises(RuntimeError):
        result.sum().backward()


@torch.no_grad()
def test_modes_and_profilers_see_it(operator, seen):
    with FlopCounterMode(display=False):
        operator(torch.ones(3), 3, None)
    assert len(seen) == 1
    with torch.profiler.profile() as profile:
        operator(torch.ones(3), 3, None)
    assert len(seen) == 2
    assert any("double_of_the_tests" in event.key for event in profile.key_averages())
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(3))
        assert operator(fake, 3, None).shape == (3,)
    assert len(seen) == 3


@torch.no_grad()
@pytest.mark.parametrize("place", [0, 2])
def test_other_kinds_of_tensors_see_it(operator, seen, place):
    arguments = [torch.ones(3), 3, torch.ones(3)]
    arguments[place] = TwoTensor(torch.ones(3), torch.ones(3))
    assert type(operator(*arguments)) is TwoTensor
    assert len(seen) == 1


@torch.no_grad()
def test_transforms_see_it(operator, seen):
    result = torch.func.vmap(lambda x: operator(x, 3, None))(torch.ones(2, 3))
    assert len(seen) == 1
    assert torch.equal(result, torch.full((2, 3), 6.0))


@torch.no_grad()
def test_compilers_see_it(operator):
    graphs = []

    def backend(graph, _):
        graphs.append(str(graph.graph))
        return graph.forward

    compiled = torch.compile(lambda x: operator(x, 3, None) + 1, backend=backend, fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 7.0))
    assert "double_of_the_tests" in graphs[0]
