"""What two processes do together for test_*distributed.py and test_fsdp.py; each writes what it found as JSON.

torchrun --nproc_per_node 2 distributed_worker.py PART OUTPUT
"""

import inspect
import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from cases import ROUGH_BODY
from helpers import tiny_model, token_ids
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from rmm_linear import convert, revert


def tensor_parallel():
    """What is said of layers that torch makes parallel after they were converted, and before."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    first, second = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
    convert(first, **ROUGH_BODY)
    for network in (first, second):
        parallelize_module(network, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
    report = convert(second, **ROUGH_BODY)
    second(torch.randn(40, 8)).sum().backward()
    try:
        first(torch.randn(40, 8))
    except RuntimeError as error:
        return {"error": str(error), "skipped": report.skipped, "converted": list(report.converted)}
    return {}


def transformers_parallel(folder):
    """What is said of a model that transformers loads in parts, all of it or but for some layers; {} if it cannot."""
    if "src_data_rank" not in inspect.signature(distribute_tensor).parameters:
        return {}
    from transformers import LlamaForCausalLM

    if dist.get_rank() == 0:
        tiny_model("llama", dropout=0.0).save_pretrained(folder)
    dist.barrier()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    made = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", device_mesh=mesh).train()
    result = {"error": ""}
    try:
        convert(made, **ROUGH_BODY)
    except ValueError as error:
        result["error"] = str(error)
    for block in made.model.layers:  # a part of it that is on every rank as a whole
        block.extra = nn.Linear(16, 16)
    result["converted"] = list(convert(made, **ROUGH_BODY).converted)
    made(input_ids=token_ids()).logits.sum().backward()
    revert(made)
    return result


def main():
    part, output, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if part == "ddp":
        import distributed_ddp as ddp

        found = {
            "ddp": ddp.ddp(rank),
            "compiled": ddp.compiled(rank),
            "estimators": ddp.estimators(rank, output),
            "accelerate": ddp.accumulation(rank),
            "accelerate, fsdp": ddp.accelerates_plugin(rank),
            "tensor parallel": tensor_parallel(),
            "transformers parallel": transformers_parallel(output / "llama"),
        }
    elif part.startswith("whole"):
        import distributed_whole as whole

        ddp, fsdp = (whole.ddp, whole.fsdp) if part == "whole" else (whole.ddp_at_length, whole.fsdp_at_length)
        found = {"ddp": ddp(rank), "fsdp": fsdp(rank) if hasattr(torch.cpu.Stream, "record_event") else {}}
    else:
        import distributed_fsdp as fsdp
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        found = {
            "plain": fsdp.fsdp(rank),
            # Pinned memory would need an accelerator.
            "half, offloaded": fsdp.fsdp(rank, mp_policy=half, offload_policy=CPUOffloadPolicy(pin_memory=False)),
            "then converted": fsdp.sharded_first(rank),
            "layers": fsdp.layers_by_themselves(rank),
        }
    (output / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()  # neither ends its threads while the other one still talks to them
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
