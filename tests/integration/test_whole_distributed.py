"""All operations in two processes under torchrun, on CPU with gloo: DDP and FSDP2."""

import pytest
import torch
from distributed_helpers import check_unbiased, run_ranks

at_length = pytest.mark.stack
NEEDS_FSDP = "fully_shard of this PyTorch does not run on CPU, as in 2.6"
CASES = [
    ("ddp", "padding"),
    ("ddp", "unused"),
    ("ddp", "own code"),
    ("ddp", "images"),
    ("fsdp", "roberta"),
    ("fsdp", "llama"),
    ("fsdp", "t5 eager"),
    ("fsdp", "resnet"),
    *(
        pytest.param(*case, marks=at_length)
        for case in (("ddp", "static"), ("ddp", "logits"), ("fsdp", "gpt2"), ("fsdp", "t5"), ("fsdp", "resharding"))
    ),
]
OWN = [
    ("ddp", "ddp"),
    ("ddp", "unused"),
    ("fsdp", "resharding"),
    pytest.param("ddp", "static", marks=at_length),
    pytest.param("fsdp", "fsdp", marks=at_length),
]
LONG = {"static", "logits", "gpt2", "t5"}
cases = pytest.mark.parametrize(("how", "case"), CASES)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns what both ranks found; the longer part runs for those who ask for it alone."""
    done = {}

    def found(how, case, own=False):
        if how == "fsdp" and not hasattr(torch.cpu.Stream, "record_event"):
            pytest.skip(NEEDS_FSDP)
        is_long = case in ({"static", "fsdp"} if own else {*LONG, "resharding"})
        part = "whole, at length" if is_long else "whole"
        if part not in done:
            done[part] = run_ranks(part, tmp_path_factory.mktemp("ranks"))
        return [rank[how]["own loss"][case] if own else rank[how][case] for rank in done[part]]

    return found


@cases
def test_gradients_are_finite_complete_and_the_same_on_all_ranks(run, how, case):
    first, second = run(how, case)
    for rank in (first, second):
        assert rank["complete"]
        assert rank["finite"]
        assert rank["buffers"] == 0  # running statistics too
    assert first["sums"] == second["sums"]


@cases
def test_averaged_gradients_are_unbiased(run, how, case):
    """Of all parameters at once."""
    check_unbiased(run(how, case)[0], 0.03)


@cases
def test_logits_that_are_not_read_are_not_computed(run, how, case):
    """Hooks of FSDP2 and the copies that DDP makes of outputs look at them; a graph that does not change needs them."""
    for rank in run(how, case):
        assert rank["reads"] == 0
        assert rank["lazy"] == (case not in ("padding", "roberta", "static", "images", "resnet"))


@pytest.mark.parametrize(("how", "case"), OWN)
def test_a_loss_of_ones_own_has_the_gradients_of_the_exact_model(run, how, case):
    """DDP finds its parameters, and the gradients are averaged in the first step and in the second."""
    for rank in run(how, case, own=True):
        assert rank < 1e-6


def test_ranks_draw_different_numbers_for_every_operation(run):
    first, second = run("ddp", "draws")
    assert first.keys() == second.keys() == {"linear", "activation", "norm", "attention"}
    for operation in first:
        assert first[operation] != second[operation], operation


@pytest.mark.parametrize(
    "name", ["roberta", "llama", "t5 eager", "resnet", *(pytest.param(n, marks=at_length) for n in ("gpt2", "t5"))]
)
def test_a_sharded_model_is_reverted(run, name):
    for rank in run("fsdp", name):
        assert rank["left"] == 0
        assert rank["reverted"] == 0
