"""``rmm-linear longest``: find the longest sequence with which a model trains within a memory budget."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial

import torch

from rmm_linear._support.tables import wrapped
from rmm_linear._support.validation import check_integer
from rmm_linear.command.flex import counted_as_trained
from rmm_linear.command.methods import OPTIMIZERS, for_training
from rmm_linear.command.models import model_on_meta, random_batch
from rmm_linear.fitting.longest import LongestSequence, max_length
from rmm_linear.fitting.options import ALLOW
from rmm_linear.fitting.search import check_size
from rmm_linear.planning.step.shards import Shards

_OPTIMIZERS = {**OPTIMIZERS, "adamw": partial(torch.optim.AdamW, fused=True)}


def run(arguments: argparse.Namespace) -> int:
    """Print the longest sequence. Return the exit status: 0, or 1 if none fits."""
    found = _found(arguments)
    if arguments.save is not None and found.plan is not None:
        found.plan.save(arguments.save)
    if arguments.json:
        print(json.dumps({"model": arguments.model, "method": arguments.method, **found.to_dict()}, indent=2))
    else:
        print(found)
        print(f"\n{_said(arguments)}")
    return 0 if found.plan is not None else 1


def _found(arguments: argparse.Namespace) -> LongestSequence:
    check_size(arguments.memory)
    for name in ("batch_size", "rank", "multiple"):
        check_integer(name, getattr(arguments, name))
    model = model_on_meta(arguments.model)
    with torch.device("meta"):
        batch = random_batch(model, arguments.batch_size, 2)
    del batch["attention_mask"]  # one without values stands for any mask
    model = for_training(model, arguments.method, rank=arguments.rank, dtype=arguments.adapters)
    notes = counted_as_trained(model)
    found = max_length(
        model,
        batch,
        arguments.memory,
        batch_size=arguments.batch_size,
        optimizer=_OPTIMIZERS[arguments.optimizer],
        shards=_shards(arguments),
        allow=ALLOW if arguments.allow is None else arguments.allow,
        host_memory=arguments.host_memory,
        bandwidth=arguments.bandwidth,
        multiple=arguments.multiple,
        progress=arguments.progress,
    )
    return replace(found, notes=(*notes, *found.notes))


def _shards(arguments: argparse.Namespace) -> Shards | None:
    ranks = arguments.ranks or (1 if arguments.offload_state else None)
    found = Shards(ranks, arguments.offload_state, arguments.context, tensor=arguments.tensor)
    return None if found == Shards() else found


def _said(arguments: argparse.Namespace) -> str:
    adapters = f"LoRA of rank {arguments.rank} on all linear layers but the head, in {arguments.adapters}; frozen "
    trained = {
        "full": "All weights are trained, in bfloat16.",
        "lora": f"{adapters}weights in bfloat16.",
        "qlora": f"{adapters}linear layers in 4 bits, other weights in bfloat16.",
    }
    state = " Parameters, gradients and the optimizer's state lie on the host." if arguments.offload_state else ""
    shards = _shards(arguments)
    devices = f" Divided among devices: {shards}." if shards is not None and shards != Shards(1, True) else ""
    return wrapped(f"{trained[arguments.method]} Optimizer: {arguments.optimizer}.{state}{devices}")
