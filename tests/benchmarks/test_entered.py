"""The files that a call enters stay as few as they are."""

import pytest
import torch

from benchmarks.suites.entered import counts, entered
from rmm_linear.backends.select import backend_of
from rmm_linear.packing.pointwise import Pointwise


def test_files_and_moves_are_counted():
    names, moves = entered(lambda: Pointwise("gelu").step(4))
    assert names == ["rmm_linear.packing.pointwise"]
    assert moves == 1


@pytest.mark.skipif(backend_of("cpu", torch.float32) != "native", reason="counts what calls the C library")
def test_a_call_enters_no_more_files_than_before():
    found = {what: (len(names), moves) for what, names, moves in counts()}
    for bits in (16, 4):
        files, moves = found[f"linear layer in a model, {bits} bits, forward"]
        assert files <= 13  # with a few lines each by which sparse, nested, meta and divided tensors are told apart
        assert moves <= 18  # the function itself asks for what it saves
    assert (
        found["RoBERTa, all operations, convert and one step"][0] <= 81
    )  # the survey of its first step among them, and own code
