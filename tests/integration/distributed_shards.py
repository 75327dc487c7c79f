"""Peaks of live tensors of two ranks that divide a step, beside those that are simulated; see distributed_worker.py."""

import functools

import torch
import torch.distributed as dist
from torch.distributed import pipelining as pp
from torch.distributed.tensor.experimental._context_parallel import _attention as rings
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from rmm_linear import Shards
from rmm_linear.memory import peak
from rmm_linear.planning import simulate

LENGTH, WORDS = 512, 256
_aten = torch.ops.aten
SIZES = {"hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 4, "vocab_size": WORDS, "use_cache": False}


def made(dtype=torch.float32, device="cpu"):
    with torch.device(device):
        config = LlamaConfig(**SIZES, num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False)
        return LlamaForCausalLM(config).to(dtype).train()


def batch(rows=2, device="cpu"):
    ids = torch.randint(3, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(5)).to(device)
    return {"input_ids": ids, "labels": ids}


def simulated(shards, dtype=torch.float32, rows=2):
    return simulate(made(dtype, "meta"), batch(rows, "meta"), shards=shards).bytes


def measured(run):
    with peak("cpu") as found:
        run()
    return found.bytes


def tensor_parallel():
    from distributed_engines import divided  # of this folder, which is on the path of the workers alone

    model = divided(made())
    return measured(lambda: model(**batch()).loss.backward()), simulated(Shards(tensor=2))


class Ring(torch.autograd.Function):
    """PyTorch's ring, with its kernels for a CPU, which ``context_parallel`` has no place for."""

    @staticmethod
    def forward(ctx, query, key, value):
        output, sums = rings._templated_ring_attention(dist.group.WORLD, 2, forward, query, key, value, is_causal=True)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx, gradient):
        return rings._templated_ring_attention_backward(
            dist.group.WORLD, 2, backward, gradient, "grad_out", *ctx.saved_tensors, is_causal=True
        )


def forward(query, key, value, is_causal):
    return _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)


def backward(query, key, value, out, logsumexp, grad_out, is_causal):
    given = grad_out, query, key, value, out, logsumexp
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, is_causal)


def context_parallel(rotate, dtype=torch.float32):
    model, attend = made(dtype), F.scaled_dot_product_attention
    own = {name: one.chunk(2, 1)[dist.get_rank()].contiguous() for name, one in batch().items()}
    rings.set_rotate_method(rotate)
    F.scaled_dot_product_attention = lambda query, key, value, **_: Ring.apply(query, key, value)
    try:
        return measured(lambda: model(**own).loss.backward()), simulated(Shards(context=2, rotate=rotate), dtype)
    finally:
        F.scaled_dot_product_attention = attend


def pipelined(schedule, name):
    from distributed_engines import Stage, next_token

    class CausalStage(Stage):
        forward = through_stage

    rank, model = dist.get_rank(), made()
    layers = torch.arange(4).tensor_split(2)[rank].tolist()
    stage = pp.PipelineStage(CausalStage(model, layers, rank == 0, rank == 1), rank, 2, torch.device("cpu"))
    run = schedule(stage, 4, loss_fn=next_token)
    ids = batch(8)["input_ids"]

    def step():
        run.step(*((ids,) if rank == 0 else ()), **({"target": ids} if rank == 1 else {}), return_outputs=False)

    found = measured(lambda: (step(), step()))  # the second adds to the gradients of the first
    return found, simulated(Shards(stages=2, stage=rank, microbatches=4, schedule=name))


def through_stage(self, x):
    x = self.model.embed_tokens(x) if hasattr(self.model, "embed_tokens") else x
    places = torch.arange(x.shape[1]).unsqueeze(0)
    for block in self.model.layers.values():
        x = block(x, position_embeddings=self.rotary(x, places), attention_mask=None, position_ids=places)
    return self.lm_head(self.model.norm(x)) if hasattr(self, "lm_head") else x


CASES = {
    "tensor": tensor_parallel,
    **{f"context, {rotate}": functools.partial(context_parallel, rotate) for rotate in ("allgather", "alltoall")},
    "context, 16 bits": functools.partial(context_parallel, "allgather", torch.bfloat16),
    "pipeline, 1F1B": functools.partial(pipelined, pp.Schedule1F1B, "1F1B"),
    "pipeline, GPipe": functools.partial(pipelined, pp.ScheduleGPipe, "GPipe"),
}


def found():
    return {name: dict(zip(("measured", "simulated"), run(), strict=True)) for name, run in CASES.items()}
