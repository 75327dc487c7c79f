"""Two processes, on CPU with gloo: DDP, FSDP2, tensor parallel; and the launchers with the GLUE script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from glue_helpers import flags, results_of

HERE = Path(__file__).resolve().parent


def environment():
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two processes found, see distributed_worker.py."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(HERE / "distributed_worker.py")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "store"), str(folder)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_ddp_ranks_draw_different_sketches(ranks):
    first, second = (set(rank["ddp"]["seeds"]) for rank in ranks)
    assert len(first) == len(second) == 4  # query, key and value share one
    assert not first & second


def test_ddp_averages_the_gradients(ranks):
    assert ranks[0]["ddp"]["gradient"] == ranks[1]["ddp"]["gradient"]


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


def test_gradients_by_estimators_of_different_ranks_are_averaged(ranks):
    assert ranks[0]["estimators"]["gradient"] == ranks[1]["estimators"]["gradient"]


@pytest.mark.parametrize(
    "how", ["ddp", "estimators", "fsdp", "fsdp, half, offloaded", "fsdp, then converted", "accelerate"]
)
def test_averaged_gradients_are_unbiased(ranks, how):
    """z = 4 on the projection on the exact average over 40 draws; noise of another S would be 0."""
    found = ranks[0][how]
    assert abs(found["mean"] - 1) < 4 * found["error"]
    assert found["error"] < 0.15


def test_no_sync_accumulates(ranks):
    """Two microbatches, of which the first is not synchronised: all that is exact ends as in the exact model."""
    for rank in ranks:
        assert len(rank["ddp"]["accumulated"]) > 10
        assert max(rank["ddp"]["accumulated"]) < 1e-6


@pytest.mark.parametrize("how", ["fsdp", "fsdp, half, offloaded"])
def test_fsdp_checkpoints_are_those_of_an_exact_model(ranks, how):
    """The gathered weights and the optimizer's state load into an unconverted model and its optimizer."""
    assert ranks[0][how]["step"] == 1
    assert ranks[0][how]["moment"] < 1e-5  # Adam's first moment after one step: a tenth of the gradient


@pytest.mark.parametrize("how", ["fsdp", "fsdp, half, offloaded"])
def test_checkpoints_of_an_exact_model_train_on_in_a_sharded_sketched_one(ranks, how):
    """Weights, Adam's moments and its count of steps arrive as they are, and the next step is taken with them."""
    for rank in ranks:
        found = rank[how]["from exact"]
        assert found["weight"] == 0
        assert found["moment"] == 0
        assert found["step"] == 2
        assert 0 < found["moved"] < 0.05  # lr is 0.01


def test_a_model_that_is_sharded_already_can_be_converted(ranks):
    first, second = (rank["fsdp, then converted"] for rank in ranks)
    assert first["same layers"]
    assert second["same layers"]
    assert len(set(first["seeds"])) == 4
    assert not set(first["seeds"]) & set(second["seeds"])


def test_accelerate_accumulates(ranks):
    """Two microbatches a step: what is exact moves as in the exact model, and both ranks take the same step."""
    for rank in ranks:
        assert rank["accelerate"]["exact parts"] < 1e-6
    assert ranks[0]["accelerate"]["step"] == ranks[1]["accelerate"]["step"]


@pytest.mark.parametrize("first", [0, 1], ids=["then parallel", "parallel before"])
def test_tensor_parallel_is_refused(ranks, first):
    for rank in ranks:
        message = "tensor parallel layers cannot be sketched. Name them in exclude_modules"
        assert message in rank["tensor parallel"][first]


LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "accelerate": [
        *(sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"),
        *("--num_machines", "1", "--num_processes", "2", "--mixed_precision", "no", "--dynamo_backend", "no"),
    ],
}


@pytest.mark.stack
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_glue_script_runs_under_launchers(model, cola, tmp_path, launcher):
    """Trained by two processes with gradient accumulation, reported once, and usable by one process."""
    argv = flags(
        *(model, cola, tmp_path / "run"),
        use_cpu=True,
        kind="countsketch",
        ratio=0.2,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        disable_tqdm="true",
    )
    command = [*LAUNCHERS[launcher], "-m", "glue_finetune", *argv]

    def launch(*more):
        done = subprocess.run([*command, *more], env=environment(), capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    output = launch()
    assert output.count("results: ") == 1
    whole = results_of(tmp_path / "run")
    assert whole["steps"] == 2 * 48 // (2 * 2 * 4)
    assert (tmp_path / "run" / "rmm_config.json").is_file()
    from transformers import AutoModelForSequenceClassification

    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    assert all(torch.isfinite(parameter).all() for parameter in loaded.parameters())
