"""Two processes under torchrun, on CPU with gloo: DDP, accelerate, compiled code."""

import pytest
from distributed_helpers import check_unbiased, run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks("ddp", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("how", ["compiled", "estimators"])
def test_all_ranks_get_the_same_gradient(ranks, how):
    assert ranks[0][how]["gradient"] == ranks[1][how]["gradient"]


@pytest.mark.parametrize("how", ["compiled", "estimators", "accelerate"])
def test_averaged_gradients_are_unbiased(ranks, how):
    check_unbiased(ranks[0][how], 0.15)


def test_ranks_leave_their_own_padding_out(ranks):
    """A batch with as many tokens that count as its sketch has rows: without padding in it, nothing is lost."""
    for rank in ranks:
        assert rank["ddp"]["padding"] < 1e-6


def test_compiled_ranks_draw_different_sketches(ranks):
    """Of one batch, from one seed, before anything is averaged."""
    first, second = (rank["compiled"] for rank in ranks)
    assert first["exact part"] == second["exact part"]
    assert first["sketched part"] != second["sketched part"]


def test_every_rank_learns_from_its_own_batches(ranks):
    """To the bit what a process by itself learns from them: nothing is exchanged."""
    first, second = (rank["estimators"] for rank in ranks)
    assert first["as alone"]
    assert second["as alone"]
    assert first["learned"]["position"] != second["learned"]["position"]
    assert first["learned"]["examples"] == [0, 1, 2, 3]
    assert second["learned"]["examples"] == [4, 5, 6, 7]


def test_all_ranks_resume_with_what_the_first_one_has_learned(ranks):
    assert ranks[0]["estimators"]["resumed"] == ranks[0]["estimators"]["learned"]
    assert ranks[1]["estimators"]["resumed"] == ranks[0]["estimators"]["learned"]


def test_no_sync_accumulates(ranks):
    """Two microbatches, of which the first is not synchronised: all that is exact ends as in the exact model."""
    for rank in ranks:
        assert rank["ddp"]["parts"] > 10
        assert rank["ddp"]["accumulated"] < 1e-6


def test_accelerate_accumulates(ranks):
    """Two microbatches a step: what is exact moves as in the exact model, and both ranks take the same step."""
    for rank in ranks:
        assert rank["accelerate"]["exact parts"] < 1e-6
    assert ranks[0]["accelerate"]["step"] == ranks[1]["accelerate"]["step"]


def test_accelerates_fsdp_plugin_runs_ddp_on_cpu(ranks):
    """As docs/training-stack.md says; if this fails, accelerate shards on CPU now, and that needs tests of its own."""
    first, second = (rank["accelerate, fsdp"] for rank in ranks)
    assert first["class"] == second["class"] == "DistributedDataParallel"
    assert first["gradient"] == second["gradient"]
