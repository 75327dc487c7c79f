"""All operations under DDP and FSDP2 in two processes; see distributed_worker.py."""

import torch
import torch.distributed as dist
from cases import WHOLE_BODY
from distributed_helpers import all_gradients, apart, batches, projection
from helpers import tiny_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from rmm_linear import convert, revert
from rmm_linear.activations.logits import LazyLogits
from rmm_linear.layers.converted import ConvertedModule

DRAWS = 10


class Counted:
    """How often logits are computed inside of the block."""

    def __enter__(self):
        self.read, self.count = LazyLogits.read, 0

        def counting(logits):
            self.count += 1
            return self.read(logits)

        LazyLogits.read = counting
        return self

    def __exit__(self, *_):
        LazyLogits.read = self.read


def made(name, **settings):
    """Without settings, exact. A chunk of the head is smaller than a batch."""
    model = tiny_model(name.removesuffix(" eager"), dropout=0.0).train()
    model.config.use_cache = False
    if name.endswith(" eager"):  # attention with code of its own, and a parameter in it
        model.set_attn_implementation("eager")
    if settings:
        convert(model, **settings)
        if name not in ("roberta", "resnet"):
            model.get_output_embeddings().rmm_chunk = 7
    return model


def inputs_of(name, rank):
    """Each rank has images of its own, or sequences, of its own lengths; padding has no label."""
    if name == "resnet":
        images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(rank))
        return {"pixel_values": images, "labels": torch.arange(4) % 2}
    (found,) = batches(rank, 1)
    if name != "roberta":
        found["labels"] = found["input_ids"].masked_fill(found["attention_mask"] == 0, -100)
    return found


def step(network, inputs, outputs=None):
    network.zero_grad()
    output = network(**inputs)
    output.loss.backward()
    if outputs is not None:
        outputs.append(output)
    return all_gradients(network)


def whole_step(wrap, name, rank):
    """Draws of all gradients of a wrapped model, against the wrapped exact one's."""
    inputs = inputs_of(name, rank)
    exact, sketched = wrap(made(name)), wrap(made(name, **WHOLE_BODY))
    want = step(exact, inputs)
    outputs = []
    torch.manual_seed(3)  # as set_seed does, on every rank alike
    with Counted() as reads:
        found = [step(sketched, inputs, outputs)]
        buffers = [
            float((one - other).abs().max()) for one, other in zip(exact.buffers(), sketched.buffers(), strict=True)
        ]
        found += [step(sketched, inputs, outputs) for _ in range(DRAWS - 1)]
    result = {
        "reads": reads.count,
        "lazy": all(isinstance(output.logits, LazyLogits) for output in outputs),
        "complete": found[0].keys() == want.keys(),
        "finite": all(bool(one.isfinite().all()) for one in found[-1].values()),
        "buffers": max(buffers, default=0.0),
        "sums": [float(one.double().sum()) for one in found[-1].values()],
        **projection(found, want),
    }
    return result, sketched


class WithSpare(nn.Module):
    """Has a parameter that no forward pass uses."""

    def __init__(self, model):
        super().__init__()
        self.model, self.spare = model, nn.Linear(2, 2)

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


def unused(model):
    return DistributedDataParallel(WithSpare(model), find_unused_parameters=True)


def unchanging(model):
    return DistributedDataParallel(model, static_graph=True)


def draws_differ(rank):
    """Of one batch and from one seed, before anything is averaged: what this rank has, operation by operation."""
    inputs, found = inputs_of("roberta", 0), {}
    for operation in ("linear", "activation", "norm", "attention"):
        network = DistributedDataParallel(made("roberta", **{**WHOLE_BODY, "operations": operation}))
        torch.manual_seed(3)
        with network.no_sync():
            gradients = step(network, inputs)
        found[operation] = sum(float(one.double().abs().sum()) for one in gradients.values())
    return found


def own_loss(wrap, rank):
    """A forward pass without labels: how far the gradients of a loss of one's own are from the exact model's."""
    inputs = inputs_of("llama", rank)
    labels = inputs.pop("labels")
    found = []
    for settings in ({}, {"operations": "logits"}):
        network = wrap(made("llama", **settings))
        for _ in range(2):
            network.zero_grad()
            logits = network(**inputs).logits
            F.cross_entropy(logits.view(-1, 64), labels.view(-1), label_smoothing=0.1).backward()
        found.append(all_gradients(network))
    return apart(*found)


def ddp(rank):
    """Padding with roberta, a parameter that is not used with llama."""
    return {
        "padding": whole_step(DistributedDataParallel, "roberta", rank)[0],
        "unused": whole_step(unused, "llama", rank)[0],
        "own code": whole_step(DistributedDataParallel, "t5 eager", rank)[0],
        "images": whole_step(DistributedDataParallel, "resnet", rank)[0],
        "draws": draws_differ(rank),
        "own loss": {"ddp": own_loss(DistributedDataParallel, rank), "unused": own_loss(unused, rank)},
    }


def ddp_at_length(rank):
    """A graph that does not change, and the plain form of a language model."""
    return {
        "static": whole_step(unchanging, "gpt2", rank)[0],
        "logits": whole_step(DistributedDataParallel, "llama", rank)[0],
        "own loss": {"static": own_loss(unchanging, rank)},
    }


def shard(network, **policies):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    from distributed_fsdp import blocks  # of this folder, which is on the path of the workers alone

    for block in blocks(network):
        fully_shard(block, mesh=mesh, **policies)
    return fully_shard(network, mesh=mesh, **policies)


def resharding(network):
    """The root's parameters too are sharded after the forward pass, as accelerate's plugin has it."""
    return shard(network, reshard_after_forward=True)


def sharded(name, rank):
    """Converted before, and reverted after."""
    result, network = whole_step(shard, name, rank)
    revert(network)
    result["left"] = sum(isinstance(module, ConvertedModule) for module in network.modules())
    inputs = inputs_of(name, rank)
    result["reverted"] = apart(step(network, inputs), step(shard(made(name)), inputs))
    return result


def fsdp(rank):
    """An encoder, a language model, a network of images, and one whose root is sharded again after its forward pass."""
    found = {name: sharded(name, rank) for name in ("roberta", "llama", "t5 eager", "resnet")}
    return {**found, "own loss": {"resharding": own_loss(resharding, rank)}}


def fsdp_at_length(rank):
    """The other architectures, and the other way to shard a root."""
    found = {name: sharded(name, rank) for name in ("gpt2", "t5")}
    found["resharding"] = whole_step(resharding, "llama", rank)[0]
    return {**found, "own loss": {"fsdp": own_loss(shard, rank)}}
