"""FSDP2 in two processes; see distributed_worker.py."""

import torch
import torch.distributed as dist
from cases import ROUGH_BODY
from distributed_helpers import (
    LAYER,
    all_gradients,
    apart,
    batches,
    gradient_of,
    microbatches_and_padding,
    model,
    projection,
)
from helpers import Mlp, seeds_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from rmm_linear import RMMLinear, convert, revert

DRAWS = 20
FULL = StateDictOptions(full_state_dict=True)


def blocks(module):
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else blocks(child)


def shard(network, **policies):
    """The model's blocks, and then the rest; on CPU also where there is an accelerator."""
    policies = {"mesh": dist.device_mesh.init_device_mesh("cpu", (2,)), **policies}
    for block in blocks(network):
        fully_shard(block, **policies)
    return fully_shard(network, **policies)


def draw(network, inputs):
    """DRAWS gradients of one layer, gathered."""
    found = []
    for _ in range(DRAWS):
        network.zero_grad()
        found.append(gradient_of(network, inputs))
    return found


def fsdp(rank, **policies):
    """Unbiased, trains, and its checkpoint is that of an exact model."""
    exact, sketched = (shard(model(converted), **policies) for converted in (False, True))
    (inputs,) = batches(rank, 1)
    want = gradient_of(exact, inputs)
    torch.manual_seed(3)
    found = draw(sketched, inputs)
    result = projection(found, want)
    if not policies:

        def step(network, inputs, last):
            network.set_requires_gradient_sync(last)
            network(**inputs).loss.backward()

        result |= microbatches_and_padding(rank, exact, sketched, step)
        sketched.zero_grad()
        found = [gradient_of(sketched, inputs)]
    optimizer = torch.optim.AdamW(sketched.parameters(), lr=1e-2)
    optimizer.step()
    weights = get_model_state_dict(sketched, options=FULL)
    state = get_optimizer_state_dict(sketched, optimizer, options=FULL)
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
        "weight": float((parameter.full_tensor() - layer).detach().abs().max()),
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
    exact, sketched = (shard(model(False)) for _ in range(2))
    report = convert(sketched, **ROUGH_BODY)
    (inputs,) = batches(rank, 1)
    want = gradient_of(exact, inputs)
    torch.manual_seed(3)
    seeds = seeds_of(lambda: sketched(inputs["input_ids"]))
    whole = convert(model(False), dry_run=True, **ROUGH_BODY)
    return {
        "same layers": report.converted.keys() == whole.converted.keys(),
        "seeds": seeds,
        **projection(draw(sketched, inputs), want),
    }


def layers_by_themselves(rank):
    """Layers that are modules of fully_shard's themselves: sketched and reverted, and converted too late."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    x = torch.randn(50, 12, generator=torch.Generator().manual_seed(rank))

    def made():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Mlp()

    def sharded(network):
        fully_shard(network.first, mesh=mesh)
        return fully_shard(network, mesh=mesh)

    def gradient(network):
        network.zero_grad()
        network(x).square().mean().backward()
        return all_gradients(network)

    exact, sketched = sharded(made()), made()
    convert(sketched, **ROUGH_BODY)
    sharded(sketched)
    is_sketched = isinstance(sketched.first, RMMLinear)
    rough = apart(gradient(sketched), gradient(exact))
    revert(sketched)
    return {
        "sketched": is_sketched,
        "rough": rough,
        "reverted": apart(gradient(sketched), gradient(exact)),
        "class": [kind.__name__ for kind in type(sketched.first).__mro__[:3]],
        "too late": convert(sharded(made()), **ROUGH_BODY).skipped,
    }
