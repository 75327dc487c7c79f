"""DDP, accelerate and compiled code in two processes; see distributed_worker.py."""

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from cases import ROUGH_BODY
from distributed_helpers import (
    DRAWS,
    LAYER,
    all_gradients,
    batches,
    gradient_of,
    microbatches_and_padding,
    model,
    projection,
)
from helpers import Mlp
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerControl, TrainerState

from rmm_linear import convert, sketch_tensors
from rmm_linear.integrations.checkpoints import SketchStateCallback

WTA = {
    **ROUGH_BODY,
    "kind": "wta",
    "norm_estimator": "position_token",
    "overrides": {"dense": {"norm_estimator": "sample_cache"}},
}


def ddp(rank):
    """Padding, and microbatches without synchronisation."""
    exact, sketched = DistributedDataParallel(model(False)), DistributedDataParallel(model(True))
    step = lambda network, inputs, last: gradient_of(network, inputs, synchronized=last)  # noqa: E731
    return microbatches_and_padding(rank, exact, sketched, step)


def compiled(rank):
    """Compiled code draws seeds by itself: from one generator and one batch, each rank has a gradient of its own."""
    x = torch.randn(200, 12, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    exact, made = Mlp(), Mlp()
    made.load_state_dict(exact.state_dict())
    convert(made, **ROUGH_BODY)
    made = DistributedDataParallel(made)
    sketched = torch.compile(made, backend="aot_eager")
    exact(x).square().mean().backward()
    torch.manual_seed(3)
    with made.no_sync():
        sketched(x).square().mean().backward()
    own, found = all_gradients(made), []
    for _ in range(DRAWS):
        made.zero_grad()
        sketched(x).square().mean().backward()
        found.append(all_gradients(made)["first.weight"])
    return {
        "exact part": own["first.bias"].tolist(),
        "sketched part": own["first.weight"].flatten().tolist(),
        "gradient": found[-1].flatten().tolist(),
        **projection(found, exact.first.weight.grad),
    }


def accumulation(rank):
    """The loop of accelerate's manual, of two microbatches a step; the optimizer is made before the conversion."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    steps = {}
    for name in ("exact", "sketched"):
        network = model(False)
        optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
        if name == "sketched":
            convert(network, **ROUGH_BODY)
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
    skip = {f"{name}.weight" for name in convert(model(False), dry_run=True, **ROUGH_BODY).converted}
    return {
        "exact parts": max(float((found[-1][key] - exact[key]).abs().max()) for key in exact.keys() - skip),
        "step": found[-1][LAYER].flatten().tolist(),
        **projection([one[LAYER] for one in found], exact[LAYER]),
    }


def accelerates_plugin(rank):
    """What accelerate makes of a model on CPU when its FSDP plugin is asked for."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    wrapped = accelerator.prepare(model(True))
    return {"class": type(wrapped).__name__, "gradient": gradient_of(wrapped, batches(rank)[0]).flatten().tolist()}


def estimators(rank, folder):
    """What each rank learns, what a checkpoint has of it, and the gradients that are sampled by it."""
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
