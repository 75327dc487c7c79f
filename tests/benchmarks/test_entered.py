"""The files that a call enters stay as few as they are."""

from benchmarks.entered import counts, entered
from rmm_linear.packing.pointwise import Pointwise


def test_files_and_moves_are_counted():
    names, moves = entered(lambda: Pointwise("gelu").step(4))
    assert names == ["rmm_linear.packing.pointwise"]
    assert moves == 1


def test_a_call_enters_no_more_files_than_before():
    found = {what: (len(names), moves) for what, names, moves in counts()}
    forward, step = found["linear layer, 4 bits, forward"], found["RoBERTa, all operations, convert and one step"]
    assert forward[0] <= 25
    assert forward[1] <= 70
    assert step[0] <= 71
