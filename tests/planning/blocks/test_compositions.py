"""Choices of several words: gradients to the bit, what runs again, what waits, and how a few blocks stand for many."""

import pytest
import torch
from composed_helpers import TOKENS, WIDTH, example, gradients, model_of, plan
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear.planning import BlockPlan, PlannedBlock, measure
from rmm_linear.planning.blocks.applied import offloaded
from rmm_linear.planning.blocks.find import find_blocks
from rmm_linear.planning.blocks.proposals import Proposals
from rmm_linear.planning.blocks.shortened import leave_out
from rmm_linear.planning.step.flops import ATTENTIONS
from rmm_linear.planning.step.step import has_memory
from rmm_linear.planning.step.watch import watch

EXACT = ["recompute + offload", "attention", "attention + offload", "selective + offload", "offload"]


@pytest.mark.parametrize("choice", EXACT)
def test_gradients_are_those_of_the_model_to_the_bit(choice, tmp_path):
    model = model_of()
    expected = gradients(model)
    with plan(model, choice, str(tmp_path)).applied(model):
        for _ in range(2):
            assert all(map(torch.equal, gradients(model), expected))
    assert all(map(torch.equal, gradients(model), expected))
    assert not [*tmp_path.rglob("offload-*")]


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.attention = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.attention += func._overloadpacket in ATTENTIONS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("choice", "calls"), [("recompute", 6), ("attention", 3), ("attention + offload", 3)])
def test_attention_whose_results_are_saved_does_not_run_again(choice, calls, tmp_path):
    model = model_of()
    with plan(model, choice, str(tmp_path)).applied(model), Calls() as seen:
        gradients(model)
    assert seen.attention == calls


def test_what_waits_is_counted(tmp_path):
    model, hidden = model_of(), 2 * TOKENS * WIDTH * 4
    found = {}
    for choice in ("recompute + offload", "attention + offload"):
        with plan(model, choice, str(tmp_path)).applied(model):
            gradients(model)
            found[choice] = {name: one.copied for name, one in offloaded(model).items()}
            written = sum(one.stat().st_size for one in tmp_path.rglob("offload-*"))
    assert found["recompute + offload"] == {f"layers.{n}": hidden for n in range(3)}
    assert found["attention + offload"] == {f"layers.{n}": 2 * hidden for n in range(3)}  # and attention's output
    assert written == 0  # all of it was read


def test_converted_blocks_may_be_recomputed(tmp_path):
    """They make codes while they are recomputed, so a step takes less, and the gradient is an estimate."""
    from rmm_linear.fitting.settings import Conversions

    model = model_of()
    names = [f"layers.{n}" for n in range(3)]
    rows = [PlannedBlock(name, "recompute + convert", setting="tenth") for name in names]
    config = Conversions(model, names).configure([*rows, PlannedBlock("head", "keep")])
    again = BlockPlan([PlannedBlock(name, "recompute") for name in names])
    peaks, expected = [], gradients(model)
    for each in (again, BlockPlan(rows, config=config)):
        with each.applied(model):
            peaks.append(watch(model, example())[0].bytes)
            found = gradients(model)
    error = sum((one - two).square().sum() for one, two in zip(found, expected, strict=True)).sqrt()
    size = sum(one.square().sum() for one in expected).sqrt()
    assert peaks[1] < 0.8 * peaks[0]
    assert 1e-4 < error / size < 0.5


@pytest.mark.parametrize(
    "choice", ["recompute + selective", "keep + offload", "selective + convert", "offload + offload"]
)
def test_words_that_do_not_go_together_are_refused(choice):
    with pytest.raises(ValueError, match="one of recompute, selective, attention, nested at most"):
        PlannedBlock("0", choice).check()


@pytest.mark.parametrize(
    "choice",
    [pytest.param(one, marks=pytest.mark.thorough) for one in ("recompute", "offload", "attention")]
    + ["recompute + offload"],
)
def test_few_like_blocks_stand_for_many(choice):
    model = model_of(layers=9, device="meta")
    names = find_blocks(model)
    costs = measure(model, example("meta"))
    rows = [PlannedBlock(name, choice if name.startswith("layers") else "keep") for name in names]
    proposals = Proposals(model, example("meta"), costs, 0)
    left_out = [f"layers.{n}" for n in range(4, 8)]
    assert [*leave_out(model, [(row.name, row.option) for row in rows])] == left_out
    assert not has_memory(model)
    measured = [found[1] for found in proposals.adding(rows).rows]
    kept, forward, backward, host = proposals._measured_by(rows, {}, holds=False)
    assert {row.name: (row.kept, row.worst, row.host) for row in measured} == {
        name: (kept[name], max(forward[name], backward[name]), host[name]) for name in names
    }
    with proposals.plan_of(rows).applied() as planned:
        peak = watch(planned, example("meta"))[0].bytes
    assert proposals.estimate(rows).bytes == peak
    assert len(model.layers) == 9
