"""Tests in two processes: how they are launched, and what the processes share (models, batches, measurements)."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from cases import ROUGH_BODY
from helpers import gradients, tiny_model, token_ids
from statistical import assert_projections, projections

from rmm_linear import convert

DRAWS = 40
LAYER = "roberta.encoder.layer.0.intermediate.dense.weight"
LENGTHS = ((20, 13, 17, 9), (7, 20, 20, 12))  # of each rank's sequences; the rest is padding


HERE = Path(__file__).resolve().parent
WORKER = HERE / "integration" / "distributed_worker.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def environment():
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def run_ranks(part, folder):
    """What two processes under torchrun found, rank by rank; see integration/distributed_worker.py."""
    command = [*TORCHRUN, "--nproc_per_node", "2", str(WORKER), part, str(folder)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def check_unbiased(found, widest):
    """Noise of another S would be many errors away."""
    assert_projections(torch.tensor(found["projections"]), widest=widest)


def batches(rank, count=2, lengths=None):
    """Each rank has sequences of its own, of its own lengths."""
    ids = token_ids(4 * count * 2, 20).view(2, count, 4, 20)[rank]
    mask = (torch.arange(20) < torch.tensor(lengths or LENGTHS[rank]).unsqueeze(1)).long()
    return [{"input_ids": one, "attention_mask": mask, "labels": one[:, 0] % 2} for one in ids]


def short_batch(rank):
    """As many tokens that count as a sketch of this batch has rows: with the padding left out, it is exact."""
    return batches(rank, 1, (5, 5, 5, 5))[0]


def model(converted, **changes):
    made = tiny_model("roberta", dropout=0.0, layers=1).train()
    if converted:
        convert(made, **{**ROUGH_BODY, **changes})
    return made


def sketched_weights():
    return {f"{name}.weight" for name in convert(model(False), dry_run=True, **ROUGH_BODY).converted}


def all_gradients(network):
    """Of a wrapped model too, and gathered where they are sharded."""
    found = {key.removeprefix("module."): value for key, value in gradients(network).items()}
    return {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in found.items()}


def gradient_of(network, inputs, name=LAYER, synchronized=True):
    with contextlib.nullcontext() if synchronized else network.no_sync():
        network(**inputs).loss.backward()
    return all_gradients(network)[name]


def apart(first, second, names=None):
    """The largest difference between two models' gradients."""
    assert first.keys() == second.keys()
    return max(float((first[key] - second[key]).abs().max()) for key in names or first)


def projection(estimates, exact):
    return {"projections": projections(estimates, exact).tolist()}
