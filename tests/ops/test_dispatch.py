"""Which code runs: plain PyTorch or the kernels; and a function, or the operator where something may see it as one."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from cases import needs_triton
from operator_helpers import SEED, SKETCH, made
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

from rmm_linear.backends import triton
from rmm_linear.backends.select import backend_of
from rmm_linear.ops import sketches as table
from rmm_linear.ops.dispatch import Operation, Operator, operation, runs_fused
from rmm_linear.spec import SaveSpec


@pytest.mark.parametrize("value", ["cuda", "", "Triton"])
def test_another_backend_is_refused(value, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", value)
    with pytest.raises(ValueError, match=f"RMM_BACKEND must be auto, torch or triton, got '{value}'"):
        SKETCH(made(), SEED, "countsketch", 7)


@pytest.fixture
def calls(monkeypatch):
    """Names of the kernels that run, in order."""
    names = []

    class Recorded:
        def __getattr__(self, name):
            def run(*args, **options):
                names.append(name)
                return getattr(kernels, name)(*args, **options)

            return run

    kernels = triton.kernels()
    monkeypatch.setattr("rmm_linear.ops.triton.kernels", Recorded)
    return names


@needs_triton
def test_the_processor_runs_pytorch_unless_asked(calls, monkeypatch):
    for value in (None, "auto", "torch"):
        if value is not None:
            monkeypatch.setenv("RMM_BACKEND", value)
        table.PACKED_SKETCH(made(), SEED, SaveSpec("countsketch", 7, bits=4), None)
    assert calls == []


@needs_triton
@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        ("countsketch", torch.float32, ["sparse_sketch"]),
        ("rows", torch.float16, ["random_keys", "sparse_sketch"]),
        ("gaussian", torch.float32, ["dense_sketch"]),
        ("rademacher", torch.bfloat16, ["dense_sketch"]),
        ("hadamard", torch.float32, ["random_keys", "dense_sketch"]),
        ("dct", torch.float32, []),
        ("countsketch", torch.float64, []),
    ],
)
def test_kernels_run_when_asked_where_there_is_one(kind, dtype, expected, calls, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", "triton")
    SKETCH(made(dtype=dtype), SEED, kind, 7)
    assert calls == expected


def test_a_dtype_among_the_arguments_chooses_too():
    """C makes no float64, whatever dtype is read; and a name is given once."""
    row = Operation("of the tests", lambda x, dtype: "plain", lambda x, dtype: "native")
    backend = "native" if backend_of("cpu", torch.float32) == "native" else "plain"
    assert [row(torch.ones(2), dtype=one) for one in (torch.float32, torch.float64)] == [backend, "plain"]
    assert row(torch.ones(2, dtype=torch.float64), torch.float32) == "plain"
    with pytest.raises(ValueError, match="There is an operation 'PACK' already"):
        operation("PACK", row.plain)


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


@pytest.mark.parametrize(
    ("version", "is_enough"), [("3.3.1", False), ("3.4.0", True), ("3.10.0+git1", True), ("4.0", True)]
)
def test_kernels_are_left_to_a_triton_that_compiles_them(version, is_enough, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__=version, __spec__=True))
    assert triton.is_installed.__wrapped__() == is_enough


def test_where_kernels_run(monkeypatch):
    x = torch.randn(2, 3)
    assert not runs_fused(x, is_composed=False)
    monkeypatch.setenv("RMM_BACKEND", "triton")
    assert runs_fused(x, is_composed=True)
    assert not runs_fused(x.double(), is_composed=False)
    assert not runs_fused(torch._neg_view(x), is_composed=False)  # memory does not hold its values
    with torch.autocast("cpu", torch.bfloat16):
        assert runs_fused(x, is_composed=False)
        assert not runs_fused(x, is_composed=True)
