"""Two processes that train a fitted model under DistributedDataParallel, for test_fit_compose.py.

torchrun --nproc_per_node 2 compose_worker.py FOLDER
"""

import copy
import faulthandler
import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from fit_cases import rows, stack, step
from torch.nn.parallel import DistributedDataParallel

import rmm_linear
from rmm_linear.planning import BlockPlan

EXACT = ("keep", "recompute")


def gradients(model, batch):
    found = step(model, batch)
    return {name.replace("module.", ""): value for name, value in found.items() if name.startswith("gradient")}


def averaged_alike(model, plain, rank):
    """Whether DDP's gradients are the mean of those of both ranks' batches without it, to the bit."""
    batches = [rows(64), rows(128)[64:]]
    parts = [gradients(plain, batch) for batch in batches]
    found = gradients(model, batches[rank])
    same = [torch.equal(value, parts[0][name] / 2 + parts[1][name] / 2) for name, value in found.items()]
    return all(same) and found.keys() == parts[0].keys()


def trained(rank):
    model = stack(2, dropout=0.0).train()
    for block in (model[1], model[2]):
        block.norm.eval()  # running statistics differ between ranks
    plain = copy.deepcopy(model)
    report = rmm_linear.fit(model, rows(64), 0.75, allow=EXACT)
    BlockPlan([*report.plan.blocks]).apply(plain)
    wrapped = DistributedDataParallel(model)
    return {"is_exact": report.is_exact, "alike": averaged_alike(wrapped, plain, rank)}


def main(folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    Path(folder, f"{rank}.json").write_text(json.dumps(trained(rank)))
    dist.barrier()
    # A wrapper that outlives the group would end the group's threads with the interpreter's lock, which they may need.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)  # rather than to wait for the other process for ever
    torch.set_num_threads(1)
    main(sys.argv[1])
