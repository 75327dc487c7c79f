"""``rmm-linear doctor``: say on one page how a model of transformers trains, and what to type."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from rmm_linear.command import PROGRAM
from rmm_linear.command.models import ERRORS, batch_for, check_batch, model_on_meta, random_model, running
from rmm_linear.integrations.doctor import doctor
from rmm_linear.memory.inputs import call_with, restored

_OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "none": None}
_LARGE = 3e8  # weights: larger models are simulated without them


def examine(arguments: argparse.Namespace) -> int:
    """Print the page. Return the exit status: 0, or 2 for bad input."""
    try:
        print(_page(arguments))
    except ERRORS as error:
        print(f"{PROGRAM} doctor: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _page(arguments: argparse.Namespace) -> Any:
    check_batch(arguments)
    model = model_on_meta(arguments.model)
    batch = batch_for(model, arguments)
    if sum(parameter.numel() for parameter in model.parameters()) <= _LARGE:
        model = random_model(arguments.model)
        with running(model, is_random=arguments.batch is None), restored(model), torch.no_grad():
            call_with(model, batch)
    else:
        batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), batch)
        if arguments.batch is None:
            batch.pop("attention_mask")  # one without values stands for any mask
    optimizer = _OPTIMIZERS[arguments.optimizer]
    # Weights are random, and so would be their noise.
    return doctor(model, batch, optimizer=optimizer, noise=False, progress=arguments.progress)
