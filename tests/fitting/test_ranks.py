"""Two processes fit a model together, in a script and in a Trainer, under DDP and fully_shard, on CPU with gloo."""

from pathlib import Path

import pytest
import torch
from distributed_helpers import start_ranks

SHARDS = hasattr(torch.cpu.Stream, "record_event")  # fully_shard of this PyTorch runs on CPU, as not in 2.6


def launched(part, tmp_path_factory):
    folder = tmp_path_factory.mktemp(part)
    return start_ranks(Path(__file__).with_name("fit_worker.py"), folder, part, folder=folder)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return launched("few", tmp_path_factory)


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    return launched("more", tmp_path_factory)


def of(launch, name):
    (first, second), _ = launch
    if name not in first:
        pytest.skip("fully_shard of this PyTorch does not run on CPU")
    return first[name], second[name]


def check_scripts(first, second, tolerance):
    """The gradients are the exact ones, and each real step takes what was predicted for it."""
    assert first["same"]
    assert second["same"]
    assert not first["is_exact"]
    for same in ("plan", "ranks", "text", "fits"):
        assert first[same] == second[same]
    assert first["fits"]
    assert first["binds"] == 1  # whose batch is longer
    assert "| 1 of 2, binds |" in first["text"]
    for (rank, simulated, measured), own in zip(first["ranks"], (first, second), strict=True):
        assert simulated == pytest.approx(measured, rel=0.001), rank
        assert own["real"] <= simulated <= (1 + tolerance) * own["real"], rank
    assert first["ranks"][0][1] < 0.8 * first["ranks"][1][1]


def check_trainers(first, second):
    """The larger batch is the first process's, then the second's; all train by the plan for it, exactly."""
    for same in ("plan", "entries", "ranks", "class"):
        assert first[same] == second[same]
    assert first["same"]
    assert second["same"]
    assert first["metrics"] == second["metrics"] == 3  # planning leaves no trace in the Trainer
    assert first["elements"] == [4 * 12, 4 * 20]
    (_, one, _), (_, other, _) = first["ranks"]
    assert one < other == first["entries"][-1]["peak_bytes"] <= first["entries"][-1]["budget_bytes"]
    assert {choice for _, choice in first["plan"]} > {"keep"}


def test_a_sharded_model_is_fitted_by_all_processes(few):
    first, second = of(few, "sharded")
    check_scripts(first, second, 0)
    assert first["buckets"][0] == 0


@pytest.mark.thorough
@pytest.mark.parametrize(("how", "tolerance"), [("ddp", 0), ("views", 0), ("half", 0), ("accumulated", 0.03)])
def test_wrappers_policies_and_accumulated_gradients_count(more, how, tolerance):
    """Buckets, gradients that are views of them, half types of FSDP; whole gradients of earlier batches, from above."""
    first, second = of(more, how)
    check_scripts(first, second, tolerance)
    buckets, gradients = first["buckets"]
    assert buckets == (gradients if how == "ddp" else 0)


@pytest.mark.thorough
def test_a_plan_that_is_too_much_for_one_rank_is_followed_by_one_of_less(more):
    first, second = of(more, "pressed")
    assert first == second
    assert first["fits"]
    assert first["plan"] == first["said"]
    assert len(first["tried"]) >= 3
    assert first["tried"][0].count("keep") > first["tried"][-1].count("keep")


def test_processes_of_a_trainer_train_by_one_plan_of_the_largest_step(few):
    first, second = of(few, "trainer")
    check_trainers(first, second)
    assert first["class"] == "DistributedDataParallel"
    printed = few[1]
    assert printed.count("A batch of 80 elements came after a plan for 48: planned again") == 1
    assert printed.count("| 0 of 2, binds |") == 1


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["trainer of parts", "trainer by accelerate"])
def test_a_trainer_with_fsdp(more, how):
    """Divided by transformers while it loads the model, or by accelerate, which does so on accelerators alone."""
    first, second = of(more, how)
    check_trainers(first, second)
    assert first["class"].startswith("FSDP")
    assert first["said"] in (None, False)  # accelerate wraps by DDP here, and does not say so


def test_all_processes_end_where_nothing_fits(few):
    first, second = of(few, "short")
    assert "cannot be met" in first
    assert "ddp_buckets" in first
    assert first == second


def test_what_one_process_raises_reaches_all(few):
    """Where it simulates its batch, of its arguments, and where the one that plans cannot meet a budget."""
    first, second = of(few, "refused")
    assert [kind for kind, _, _ in second] == ["IndexError", "ValueError", "BudgetError", "ValueError"]
    assert [kind for kind, _, _ in first] == ["RuntimeError", "ValueError", "BudgetError", "ValueError"]
    assert first[0][1] == f"On rank 1: IndexError: {second[0][1]}"
    assert second[1][1].startswith("memory as a share must be in (0, 1]")
    assert first[1][1] == f"On rank 1: {second[1][1]}"
    assert first[2][1] == second[2][1]
    assert first[3][1] == second[3][1]
    assert "got memory=0.9" in first[3][1]
    assert not any(is_planned for _, _, is_planned in (*first, *second))
