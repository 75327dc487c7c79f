"""What two processes do together for test_*distributed.py and test_fsdp.py; each writes what it found as JSON.

torchrun --nproc_per_node 2 distributed_worker.py PART OUTPUT
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from helpers import tiny_model


def engines(rows, draws, folder):
    """Every engine and case of ``rows``, "engine/case;…"."""
    import distributed_engines as engines

    os.environ["ENGINE_MODELS"] = f"{folder}/"
    if dist.get_rank() == 0 and "transformers" in rows:
        for name in ("llama", "mixtral"):
            tiny_model(name, dropout=0.0).save_pretrained(folder / name)
    dist.barrier()
    if "ZeRO" in rows:
        import deepspeed.comm.torch

        deepspeed.comm.torch.build_shm_op = lambda: None  # a kernel that it would compile
        deepspeed.init_distributed("gloo", verbose=False)
    found = {row: engines.found_by(*row.split("/"), int(draws)) for row in rows.split(";")}
    return found if "ZeRO" in rows else {**found, "refused": engines.refusals()}


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
        }
    elif part == "engines":
        found = engines(*sys.argv[3:], output)
    elif part == "mesh":
        import distributed_engines

        found = distributed_engines.replicas()
    elif part == "shards":
        import distributed_shards

        found = distributed_shards.found()
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
