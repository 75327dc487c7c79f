"""What two processes do together for tests/test_distributed.py; each writes what it found as JSON.

python distributed_worker.py RANK STORE OUTPUT
"""

import contextlib
import json
import math
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import Accelerator
from helpers import gradients, seeds_of, tiny_model, token_ids
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerControl, TrainerState

from rmm_linear import convert, sketch_tensors
from rmm_linear.integrations.checkpoints import SketchStateCallback

DRAWS = 40
ROUGH = {"kind": "countsketch", "ratio": 0.25, "min_rows": 8}
WTA = {
    **ROUGH,
    "kind": "wta",
    "norm_estimator": "position_token",
    "overrides": {"dense": {"norm_estimator": "sample_cache"}},
}
LAYER = "roberta.encoder.layer.0.intermediate.dense.weight"
FULL = StateDictOptions(full_state_dict=True)


def batches(rank, count=2):
    """Each rank has sequences of its own."""
    ids = token_ids(4 * count * 2, 20).view(2, count, 4, 20)[rank]
    return [{"input_ids": one, "labels": one[:, 0] % 2} for one in ids]


def model(converted, **changes):
    made = tiny_model("roberta", dropout=0.0, layers=1).train()
    if converted:
        convert(made, **{**ROUGH, **changes})
    return made


def gradient_of(network, inputs, name=LAYER, synchronized=True):
    with contextlib.nullcontext() if synchronized else network.no_sync():
        network(**inputs).loss.backward()
    return {key.removeprefix("module."): value for key, value in gradients(network).items()}[name]


def projection(values, exact):
    values = torch.stack([(one * exact).sum() / exact.square().sum() for one in values])
    return {"mean": values.mean().item(), "error": (values.std() / math.sqrt(len(values))).item()}


def ddp(rank):
    """Seeds, averaged gradients, and microbatches without synchronisation."""
    exact, sketched = DistributedDataParallel(model(False)), DistributedDataParallel(model(True))
    first, second = batches(rank)
    torch.manual_seed(3)  # as set_seed does, on every rank alike
    seeds = seeds_of(lambda: sketched(**first))
    want = gradient_of(exact, first)
    found = []
    for _ in range(DRAWS):
        sketched.zero_grad()
        found.append(gradient_of(sketched, first))
    result = {"seeds": seeds, "gradient": found[-1].flatten().tolist(), **projection(found, want)}

    accumulated = {}
    for name, network in (("exact", exact), ("sketched", sketched)):
        network.zero_grad()
        gradient_of(network, first, synchronized=False)
        gradient_of(network, second)
        accumulated[name] = {key: value.flatten().tolist() for key, value in gradients(network).items()}
    report = convert(tiny_model("roberta", layers=1), dry_run=True, **ROUGH)
    skip = {f"module.{name}.weight" for name in report.converted}
    result["accumulated"] = [
        float((torch.tensor(value) - torch.tensor(accumulated["sketched"][key])).abs().max())
        for key, value in accumulated["exact"].items()
        if key not in skip
    ]
    return result


def accumulation(rank):
    """The loop of accelerate's manual, of two microbatches a step; the optimizer is made before the conversion."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    steps = {}
    for name in ("exact", "sketched"):
        network = model(False)
        optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
        if name == "sketched":
            convert(network, **ROUGH)
        before = {key: value.detach().clone() for key, value in network.named_parameters()}
        wrapped, prepared = accelerator.prepare(network, optimizer)
        synchronized, steps[name] = [], []
        torch.manual_seed(3)
        for _ in range(DRAWS if name == "sketched" else 1):
            for inputs in batches(rank):
                with accelerator.accumulate(wrapped):
                    accelerator.backward(wrapped(**inputs).loss)
                    synchronized.append(accelerator.sync_gradients)
                    prepared.step()
                    prepared.zero_grad()
            steps[name].append({key: before[key] - value.detach() for key, value in network.named_parameters()})
            network.load_state_dict(before, strict=False)
        assert synchronized == [False, True] * len(steps[name]), synchronized
    exact, found = steps["exact"][0], steps["sketched"]
    skip = {f"{name}.weight" for name in convert(model(False), dry_run=True, **ROUGH).converted}
    return {
        "exact parts": max(float((found[-1][key] - exact[key]).abs().max()) for key in exact.keys() - skip),
        "step": found[-1][LAYER].flatten().tolist(),
        **projection([one[LAYER] for one in found], exact[LAYER]),
    }


def estimators(rank, folder):
    """What each rank learns, what a checkpoint has of it, and the gradients that are drawn by it."""
    made, alone = model(True, **WTA), model(True, **WTA)
    exact, sketched = DistributedDataParallel(model(False)), DistributedDataParallel(made)
    numbers = {"sample_index": torch.arange(4) + 4 * rank}
    torch.manual_seed(3)
    for inputs in batches(rank):  # the weights stay, so a model by itself sees the same gradients
        for network in (sketched, alone):
            network(**inputs, **numbers).loss.backward()

    def learned():
        tensors = sketch_tensors(made)
        position, cache = (tensors[f"{layer}:{part}"] for layer, part in parts)
        return {
            "position": position.flatten().tolist(),
            "examples": (~cache.isnan().all(1)).nonzero().view(-1).tolist(),
        }

    key = "roberta.encoder.layer.0.attention.self.key"  # of query, only the first token has a gradient
    parts = ((key, "position"), (LAYER.removesuffix(".weight"), "cache"))
    own, single = sketch_tensors(made), sketch_tensors(alone)
    same = own.keys() == single.keys() and all(
        torch.equal(own[k].nan_to_num(-1), single[k].nan_to_num(-1)) for k in own
    )
    result = {"as alone": same, "learned": learned()}

    arguments = SimpleNamespace(output_dir=str(folder), resume_from_checkpoint=None)
    state, control = TrainerState(global_step=2, is_world_process_zero=rank == 0), TrainerControl()
    Path(folder, "checkpoint-2").mkdir(exist_ok=True)
    callback = SketchStateCallback()
    callback.on_save(arguments, state, control, model=made)
    dist.barrier()
    callback.on_train_begin(arguments, state, control, model=made)
    result["resumed"] = learned()

    first = batches(rank)[0]
    exact.zero_grad()
    want = gradient_of(exact, first)
    found = []
    for _ in range(DRAWS):
        sketched.zero_grad()
        found.append(gradient_of(sketched, {**first, **numbers}))
    return {**result, "gradient": found[-1].flatten().tolist(), **projection(found, want)}


def shard(network, **policies):
    for block in network.roberta.encoder.layer:
        fully_shard(block, **policies)
    return fully_shard(network, **policies)


def fsdp(rank, **policies):
    """Unbiased, trains, and its checkpoint is that of an exact model."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    exact, sketched = (shard(model(converted), mesh=mesh, **policies) for converted in (False, True))
    (inputs,) = batches(rank, 1)
    exact(**inputs).loss.backward()
    want = dict(exact.named_parameters())[LAYER].grad.full_tensor().clone()
    torch.manual_seed(3)
    found = []
    for _ in range(DRAWS):
        sketched.zero_grad()
        sketched(**inputs).loss.backward()
        found.append(dict(sketched.named_parameters())[LAYER].grad.full_tensor().clone())
    optimizer = torch.optim.AdamW(sketched.parameters(), lr=1e-2)
    optimizer.step()
    weights = get_model_state_dict(sketched, options=FULL)
    state = get_optimizer_state_dict(sketched, optimizer, options=FULL)
    result = projection(found, want)
    if rank == 0:
        plain = model(False)
        plain.load_state_dict(weights)
        other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        set_optimizer_state_dict(plain, other, state, options=FULL)
        moments = other.state[plain.roberta.encoder.layer[0].intermediate.dense.weight]
        result["step"] = int(moments["step"])
        result["moment"] = float((moments["exp_avg"] - 0.1 * found[-1]).abs().max() / found[-1].abs().max())
    result["from exact"] = from_exact(inputs, sketched, optimizer)
    return result


def from_exact(inputs, sketched, optimizer):
    """Weights and Adam's moments of an exact model after two steps, into a sharded, sketched one: how far off."""
    plain = model(False)
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(2):
        other.zero_grad()
        plain(**batches(0, 1)[0]).loss.backward()
        other.step()
    weights, state = (get(plain, other) for get in (lambda m, _: get_model_state_dict(m), get_optimizer_state_dict))
    set_model_state_dict(sketched, weights, options=FULL)
    set_optimizer_state_dict(sketched, optimizer, state, options=FULL)
    layer, parameter = plain.get_parameter(LAYER), sketched.get_parameter(LAYER)
    moments = optimizer.state[parameter]
    result = {
        "weight": float((parameter.full_tensor() - layer).abs().max()),
        "moment": float((moments["exp_avg_sq"].full_tensor() - other.state[layer]["exp_avg_sq"]).abs().max()),
        "step": int(moments["step"]),
    }
    sketched.zero_grad()
    sketched(**inputs).loss.backward()
    optimizer.step()
    moved = (parameter.full_tensor() - layer).abs().max()
    return {**result, "moved": float(moved)}


def sharded_first(rank):
    """Converted after fully_shard, as by who gets a model from a framework."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    exact, sketched = (shard(model(False), mesh=mesh) for _ in range(2))
    report = convert(sketched, **ROUGH)
    (inputs,) = batches(rank, 1)
    exact(**inputs).loss.backward()
    want = exact.get_parameter(LAYER).grad.full_tensor().clone()
    torch.manual_seed(3)
    seeds = seeds_of(lambda: sketched(**inputs))
    found = []
    for _ in range(DRAWS):
        sketched.zero_grad()
        sketched(**inputs).loss.backward()
        found.append(sketched.get_parameter(LAYER).grad.full_tensor().clone())
    whole = convert(model(False), dry_run=True, **ROUGH)
    return {"same layers": report.converted.keys() == whole.converted.keys(), "seeds": seeds, **projection(found, want)}


def tensor_parallel(rank, first):
    """What a sketched layer says that is made parallel before, or after, it was converted."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    network = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for act in (convert, parallelize) if first == "converted" else (parallelize, convert):
        act(network, **ROUGH) if act is convert else act(network, mesh)
    try:
        network(torch.randn(40, 8))
    except RuntimeError as error:
        return str(error)
    return "no error"


def parallelize(network, mesh):
    parallelize_module(network, mesh, {"0": ColwiseParallel()})


def main():
    rank, store, output = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    # What accelerate asks for; the process group is ours.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {
        "ddp": ddp(rank),
        "estimators": estimators(rank, output),
        "fsdp": fsdp(rank),
        # Pinned memory would need an accelerator.
        "fsdp, half, offloaded": fsdp(rank, mp_policy=half, offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "fsdp, then converted": sharded_first(rank),
        "accelerate": accumulation(rank),
        "tensor parallel": [tensor_parallel(rank, first) for first in ("converted", "parallel")],
    }
    (output / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
