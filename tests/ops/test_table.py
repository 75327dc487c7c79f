"""Which code runs: plain PyTorch, or the kernels where they are asked for and there is one."""

from __future__ import annotations

import pytest
import torch
from cases import needs_triton
from operator_helpers import SEED, SKETCH, made

from rmm_linear.backends import triton
from rmm_linear.ops import sketches as table
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
