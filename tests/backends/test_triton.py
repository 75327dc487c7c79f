"""Kernels are tried when a device first asks for them; where they do not start, plain PyTorch does their work."""

from __future__ import annotations

import subprocess

import pytest
import torch
from cases import needs_triton
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear.backends import select, triton
from rmm_linear.backends.select import backend_of, backends_of
from rmm_linear.ops import masks

pytestmark = needs_triton


class Kernels:
    """Fails as Triton does without a compiler, or without Python's headers."""

    error: Exception | None = RuntimeError("Failed to find C compiler. Please specify via CC.\nMore lines.")

    def __init__(self):
        self.launches = []

    def random_keys(self, seed, tokens):
        self.launches.append(seed.device.type)
        if self.error is not None:
            raise self.error


@pytest.fixture
def machine(monkeypatch):
    """The CPU plays an accelerator, on which nothing was launched yet."""
    kernels = Kernels()
    monkeypatch.setattr(select, "ACCELERATORS", ("cpu",))
    monkeypatch.setattr(triton, "_failures", {})
    monkeypatch.setattr(triton, "kernels", lambda: kernels)
    return kernels


def test_a_launch_that_fails_is_said_once_and_pytorch_runs_from_then_on(machine, caplog):
    for _ in range(3):
        assert "triton" not in backends_of("cpu")
        assert backend_of("cpu", torch.float32) != "triton"
    assert machine.launches == ["cpu"]
    (said,) = caplog.messages
    assert said.startswith("Triton's kernels do not start on cpu, so plain PyTorch does their work")
    assert "RuntimeError: Failed to find C compiler. Please specify via CC. Triton compiles" in said
    assert "install gcc or clang" in said
    assert "More lines" not in said


def test_a_compiler_that_finds_no_headers_counts_too(machine, caplog):
    machine.error = subprocess.CalledProcessError(1, ["gcc", "main.c"])
    assert backends_of("cpu")[-1] == "plain"
    assert "CalledProcessError: Command '['gcc', 'main.c']' returned non-zero exit status 1. Triton" in caplog.text


def test_a_launch_that_succeeds_is_not_repeated(machine, caplog):
    machine.error = None
    assert [backends_of("cpu")[0] for _ in range(3)] == ["triton"] * 3
    assert machine.launches == ["cpu"]
    assert caplog.messages == []


def test_who_asks_for_the_kernels_gets_an_error(machine, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"RMM_BACKEND=triton needs .* on cpu, got RuntimeError: Failed to find"):
            backends_of("cpu")


def test_who_asks_for_pytorch_launches_nothing(machine, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", "torch")
    assert backends_of("cpu") == ("plain",)
    assert machine.launches == []


def test_an_operation_falls_back(machine):
    """And keeps what it chose."""
    x, row = torch.ones(3, 9), masks.PACK_MASK
    row._chosen.clear()
    assert torch.equal(row(x, None), row.plain(x, None))
    assert machine.launches == ["cpu"]


def test_nothing_is_launched_under_fake_tensors_or_while_a_graph_is_captured(machine, monkeypatch):
    with FakeTensorMode():
        assert backends_of("cpu")[0] == "triton"
    monkeypatch.setattr(triton, "is_capturing", lambda device: True)
    assert backends_of("cpu")[0] == "triton"
    assert machine.launches == []
    monkeypatch.undo()
    assert triton.failure("cuda") is None or torch.cuda.is_available()  # nor where there is no device


def test_no_mode_sees_the_launch(machine):
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        assert backends_of("cpu")[0] != "triton"
    assert machine.launches == ["cpu"]
    assert seen == []
