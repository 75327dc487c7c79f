"""FSDP2 in two processes under torchrun, on CPU with gloo."""

import pytest
import torch
from distributed_helpers import check_unbiased, run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard of this PyTorch does not run on CPU, as in 2.6"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks("fsdp", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("how", ["plain", "half, offloaded", "then converted"])
def test_averaged_gradients_are_unbiased(ranks, how):
    check_unbiased(ranks[0][how], 0.15)


def test_ranks_leave_their_own_padding_out(ranks):
    """A batch with as many tokens that count as its sketch has rows: without padding in it, nothing is lost."""
    for rank in ranks:
        assert rank["plain"]["padding"] < 1e-6


def test_microbatches_accumulate_without_synchronisation(ranks):
    """``set_requires_gradient_sync(False)`` for the first of two: all that is exact ends as in the exact model."""
    for rank in ranks:
        assert rank["plain"]["parts"] > 10
        assert rank["plain"]["accumulated"] < 1e-6


@pytest.mark.parametrize("how", ["plain", "half, offloaded"])
def test_checkpoints_are_those_of_an_exact_model(ranks, how):
    """The gathered weights and the optimizer's state load into an unconverted model and its optimizer."""
    assert ranks[0][how]["step"] == 1
    assert ranks[0][how]["moment"] < 1e-5  # Adam's first moment after one step: a tenth of the gradient


@pytest.mark.parametrize("how", ["plain", "half, offloaded"])
def test_checkpoints_of_an_exact_model_train_on_in_a_sharded_sketched_one(ranks, how):
    """Weights, Adam's moments and its count of steps arrive as they are, and the next step is taken with them."""
    for rank in ranks:
        found = rank[how]["from exact"]
        assert found["weight"] == 0
        assert found["moment"] == 0
        assert found["step"] == 2
        assert 0 < found["moved"] < 0.05  # lr is 0.01


def test_a_model_that_is_sharded_already_can_be_converted(ranks):
    first, second = (rank["then converted"] for rank in ranks)
    assert first["same layers"]
    assert second["same layers"]
    assert len(set(first["seeds"])) == 4
    assert not set(first["seeds"]) & set(second["seeds"])


def test_a_layer_that_was_sharded_by_itself_is_skipped(ranks):
    for rank in ranks:
        reason = "it was sharded by itself, as FSDPLinear: call convert before fully_shard"
        assert rank["layers"]["too late"] == {"first": reason}


def test_revert_keeps_layers_sharded_that_were_sharded_by_themselves(ranks):
    """Sketched before, and then to the bit the gradients of a model that never was."""
    for rank in ranks:
        assert rank["layers"]["sketched"]
        assert rank["layers"]["rough"] > 1e-4
        assert rank["layers"]["reverted"] == 0
        assert rank["layers"]["class"] == ["FSDPLinear", "FSDPModule", "Linear"]
