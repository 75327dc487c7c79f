"""Tests in some processes: how they are launched, and what they share (models, batches, measurements)."""

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import runpy
import sys
import time
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
_PRELOAD = ["torch._dynamo", "transformers.trainer", "transformers.models.roberta.modeling_roberta", "rmm_linear"]


def environment():
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def start_ranks(script, *arguments, folder, count=2):
    """Run a script in some processes as torchrun would; they are forked from one that has imported everything.

    Returns:
        What each wrote as JSON into the folder, and what they printed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), **environment()}
    logs = [folder / f"{rank}.log" for rank in range(count)]
    ranks = []
    for rank, log in enumerate(logs):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(context.Process(target=_rank, args=(own, log, [str(script), *map(str, arguments)])))
        ranks[-1].start()
    end = time.monotonic() + 300
    try:
        while any(one.is_alive() for one in ranks) and all(one.exitcode in (None, 0) for one in ranks):
            assert time.monotonic() < end, "too long"
            multiprocessing.connection.wait([one.sentinel for one in ranks if one.is_alive()], 1)
    finally:
        for one in ranks:
            one.kill()
            one.join()
    printed = "".join(log.read_text() for log in logs)
    assert [one.exitcode for one in ranks] == [0] * count, printed
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)], printed


def _rank(environment, log, command):
    """Run a script with this environment, and with its output in a file."""
    os.environ.update(environment)
    with open(log, "wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.argv, sys.path[:0] = command, [str(HERE), str(HERE.parent), str(Path(command[0]).parent)]
    runpy.run_path(command[0], run_name="__main__")


def run_ranks(part, folder, *arguments, count=2):
    """What the processes found, rank by rank; see integration/distributed_worker.py."""
    return start_ranks(WORKER, part, folder, *arguments, folder=folder, count=count)[0]


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


def microbatches_and_padding(rank, exact, sketched, step):
    """How far gradients are from the exact ones: of a step of two microbatches, and of a batch whose sketch is exact.

    ``step(network, inputs, last)`` makes a backward pass; gradients are averaged after the last one alone.
    """
    accumulated, short = [], []
    for network in (exact, sketched):
        network.zero_grad()
        for number, inputs in enumerate(batches(rank)):
            step(network, inputs, number == 1)
        accumulated.append(all_gradients(network))
        network.zero_grad()
        step(network, short_batch(rank), True)
        short.append(all_gradients(network))
    same = accumulated[0].keys() - sketched_weights()
    return {"parts": len(same), "accumulated": apart(*accumulated, same), "padding": apart(*short)}


def apart(first, second, names=None):
    """The largest difference between two models' gradients."""
    assert first.keys() == second.keys()
    return max(float((first[key] - second[key]).abs().max()) for key in names or first)


def projection(estimates, exact):
    return {"projections": projections(estimates, exact).tolist()}
