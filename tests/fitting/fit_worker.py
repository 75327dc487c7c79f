"""Two processes that train with RMMCallback(fit=...) under DDP, for test_callback.py; each writes what it found.

torchrun --nproc_per_node 2 fit_worker.py OUTPUT
"""

import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from fit_helpers import cut, elements, entries, fitting

LENGTHS = ((12, 8, 8), (8, 8, 20))  # of each rank's batches; the largest is the other rank's each time


def done(plan):
    return [[block.name, block.option] for block in plan.blocks]


def trained(folder, rank):
    fit = {"memory": 0.75, "allow": ["keep", "recompute"]}
    trainer, callback, _ = fitting(folder / "run", fit, max_steps=3, ddp_backend="gloo")
    cut(trainer, LENGTHS[rank])
    trainer.train()
    found = {
        "plan": done(trainer.model.rmm_plan),
        "elements": elements(trainer),
        "entries": entries(trainer),
        "has_report": callback.fit_report is not None,
        "weights": [float(p.detach().double().sum()) for p in trainer.model.parameters()],
    }

    trainer, _, _ = fitting(folder / "none", 1000, max_steps=1, ddp_backend="gloo")
    try:
        trainer.train()
    except ValueError as error:
        found["error"] = str(error)

    trainer, callback, _ = fitting(folder / "bytes", "1GB", max_steps=1, ddp_backend="gloo")
    trainer.train()
    if callback.fit_report is not None:
        found["kept_back"] = 10**9 - callback.fit_report.memory
        found["gradients"] = callback.fit_report.static.gradients
    return found


def main(folder):
    rank = int(os.environ["RANK"])
    (folder / f"{rank}.json").write_text(json.dumps(trained(folder, rank)))
    # A wrapper that outlives the group would end the group's threads with the interpreter's lock, which they may need.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
