"""The files that a call enters stay as few as they are."""

from benchmarks.entered import counts, entered
from rmm_linear.packing.pointwise import Pointwise


def test_files_and_moves_are_counted():
    names, moves = entered(lambda: Pointwise("gelu").step(4))
    assert names == ["rmm_linear.packing.pointwise"]
    assert moves == 1


def test_a_call_enters_no_more_files_than_before():
    found = {what: (len(names), moves) for what, names, moves in counts()}
    assert found["linear layer in a model, 16 bits, forward"] <= (9, 15)
    assert found["linear layer in a model, 4 bits, forward"] <= (10, 17)
    assert found["RoBERTa, all operations, convert and one step"][0] <= 57
