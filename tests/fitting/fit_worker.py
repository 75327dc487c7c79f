"""Two processes that fit a model together, for test_ranks.py; each writes what it found.

torchrun --nproc_per_node 2 fit_worker.py OUTPUT few|more
"""

import contextlib
import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from fit_helpers import cut, elements, entries, fitting
from helpers import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from trainer_helpers import make_trainer
from transformers import LlamaForCausalLM

import rmm_linear
from rmm_linear.fitting.resident import Resident, resident
from rmm_linear.memory import peak

LENGTHS = ((12, 8, 8), (8, 8, 20))  # of each rank's batches; the largest is the other rank's each time
EXACT = {"allow": ("keep", "recompute"), "progress": False}
SHARDS = hasattr(torch.cpu.Stream, "record_event")  # fully_shard runs on CPU
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def done(plan):
    return [[block.name, block.option] for block in plan.blocks]


def whole(tensors):
    return [(one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone() for one in tensors]


def same(first, second):
    return all(map(torch.equal, first, second))


# Scripts


def made():
    model = tiny_model("llama", dropout=0.0, layers=3, width=32).train()
    model.config.use_cache = False
    return model


def sharded(model, **policies):
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)), **policies)
    return model


HOWS = {
    "ddp": DistributedDataParallel,
    "views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    "sharded": sharded,
    "half": lambda model: sharded(model, mp_policy=HALF),
    "accumulated": sharded,
}


def batch_of(length):
    ids = torch.randint(3, 64, (4, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "labels": ids}


@contextlib.contextmanager
def accumulating(model, how):
    """Let a first batch leave whole gradients, as it is not synchronised."""
    if how == "accumulated":
        model.set_requires_gradient_sync(False)
        model(**batch_of(8)).loss.backward()
    yield how == "accumulated"
    if how == "accumulated":
        model.set_requires_gradient_sync(True)


def fitted(rank, how, budget):
    """Gradients with a plan and without it, and the peak of a real step beside the predicted one."""
    batch, found = batch_of((12, 32)[rank]), {}
    for name in ("exact", "planned"):
        model = HOWS[how](made())
        with accumulating(model, how) as accumulates:
            if name == "planned":
                process = resident(model, torch.optim.AdamW, accumulate=accumulates)
                report = rmm_linear.fit(
                    model, batch, budget, optimizer=torch.optim.AdamW, accumulate=accumulates, **EXACT
                )
        with peak("cpu") as measured:
            model(**batch).loss.backward()
        found[name] = whole(parameter.grad for parameter in model.parameters())
    inner = getattr(model, "module", model)
    return {
        "same": same(found["exact"], found["planned"]),
        "plan": done(inner.rmm_plan),
        "is_exact": report.is_exact,
        "fits": report.fits,
        "real": process.bytes + measured.bytes,
        "ranks": [[one.rank, one.simulated, one.measured] for one in report.ranks],
        "binds": report.binding_rank.rank,
        "text": str(report),
        "buckets": [report.static.ddp_buckets, report.static.gradients],
    }


def refused(rank):
    """What one process raises reaches the other: while it simulates its batch, of its arguments, and as it plans."""
    model, found = DistributedDataParallel(made()), []
    good, wide = batch_of(12), {**batch_of(16), "input_ids": torch.full((4, 16), 64)}  # beyond the vocabulary
    for batches, budgets in (
        ((good, wide), (0.9, 0.9)),
        ((good, good), (0.9, 1.5)),
        ((good, good), (1000, 1000)),
        ((good, good), (0.9, 0.8)),
    ):
        try:
            rmm_linear.fit(model, batches[rank], budgets[rank], **EXACT)
        except Exception as error:
            found.append([type(error).__name__, str(error), hasattr(model.module, "rmm_plan")])
    return found


def pressed(rank):
    """The process that does not plan runs out of memory with the first plan, and exceeds the budget with the second."""
    model, real, found = DistributedDataParallel(made()), Resident.measured, []

    def measured(process, example):
        found.append([block.choice for block in model.module.rmm_plan.blocks])
        if rank == 0 and len(found) == 1:
            raise torch.OutOfMemoryError
        return real(process, example) + 1_000_000 * (rank == 0 and len(found) == 2)

    Resident.measured = measured
    try:
        report = rmm_linear.fit(model, batch_of((12, 32)[rank]), 0.95, **EXACT)
    finally:
        Resident.measured = real
    return {"tried": found, "fits": report.fits, "plan": done(model.module.rmm_plan), "said": done(report.plan)}


# Trainers


def loaded(folder):
    """A model that transformers divides when it loads it."""
    if dist.get_rank() == 0:
        made().save_pretrained(folder)
    dist.barrier()

    def load(_):
        model = LlamaForCausalLM.from_pretrained(folder, distributed_config={"fsdp_size": 2})
        model.config.use_cache = False
        return model

    return load


def by_accelerate(trainer):
    """Let accelerate shard, which it does on accelerators alone: on CPU it wraps the model in DDP, and says nothing."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    arguments = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "reshard_after_forward": True}
    state, is_alone = trainer.accelerator.state, trainer.is_fsdp_enabled
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        **arguments, transformer_cls_names_to_wrap=["RobertaLayer"], state_dict_type="FULL_STATE_DICT"
    )
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    trainer.is_fsdp_enabled = True
    return is_alone


def trained(folder, rank, budget, wrap=None, prepare=lambda trainer: None):
    """Three steps with a plan, which end with the weights of three steps without."""
    ends = []
    for is_fitted in (False, True):
        options = {"max_steps": 3, "ddp_backend": "gloo", "wrap": wrap}
        if is_fitted:
            trainer, callback, _ = fitting(folder, {"memory": budget, **EXACT}, **options)
        else:
            trainer, _, _ = make_trainer(folder, config=None, **options)
        said = prepare(trainer)
        if wrap is not None:
            label(trainer)
        cut(trainer, LENGTHS[rank])
        gather_metrics(trainer)
        trainer.train()
        ends.append(whole(trainer.model.parameters()))
    return {
        "plan": done(trainer.model.rmm_plan),
        "class": type(trainer.model_wrapped).__name__,
        "elements": elements(trainer),
        "entries": entries(trainer),
        "ranks": [[one.rank, one.simulated, one.measured] for one in callback.fit_report.ranks],
        "metrics": len(trainer.metrics),
        "same": same(*ends),
        "said": said,
    }


def gather_metrics(trainer):
    """Let the loss be another one than the model's, and communicate, as TRL's do for their metrics."""
    compute, trainer.metrics = trainer.compute_loss, []

    def computed(*args, **kwargs):
        loss = 2 * compute(*args, **kwargs)
        trainer.metrics.append(trainer.accelerator.gather(loss.detach()).mean())
        return loss

    trainer.compute_loss = computed


def label(trainer):
    """Let a language model predict what it reads."""
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: {**(batch := collate(rows)), "labels": batch["input_ids"]}


def short(folder):
    trainer, _, _ = fitting(folder, 1000, max_steps=1, ddp_backend="gloo")
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return ""


def main(folder, part):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if part == "few":
        found = {"trainer": trained(folder / "run", rank, 0.8), "short": short(folder), "refused": refused(rank)}
        found |= {"sharded": fitted(rank, "sharded", 0.85)} if SHARDS else {}
    else:
        found = {how: fitted(rank, how, 0.8) for how in ("ddp", "views")} | {"pressed": pressed(rank)}
        if SHARDS:
            found |= {how: fitted(rank, how, 0.85) for how in ("half", "accumulated")}
            found["trainer of parts"] = trained(folder / "run", rank, 0.85, loaded(folder / "model"))
            found["trainer by accelerate"] = trained(folder / "run", rank, 0.85, prepare=by_accelerate)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    # A wrapper that outlives the group would end the group's threads with the interpreter's lock, which they may need.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
