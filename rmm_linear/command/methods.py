"""Prepare a model for a way to train it: all weights, or adapters on frozen ones."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from rmm_linear._support.validation import check_integer
from rmm_linear.command.models import batch_for, check_batch, model_on_meta, random_model, running
from rmm_linear.fitting.quantised import as_quantised
from rmm_linear.memory.inputs import call_with, restored
from rmm_linear.planning.step.resize import usable_positions

_LARGE = 3e8  # weights: larger models are simulated without them
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "none": None}
ADAPTERS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def prepared(arguments: argparse.Namespace, *, on_meta: bool = False) -> tuple[nn.Module, Any]:
    """Make the model and the batch of a command, as they are trained; large models, or all, have no weights."""
    check_batch(arguments)
    check_integer("rank", arguments.rank)
    model = model_on_meta(arguments.model)
    batch = batch_for(model, arguments)
    is_small = sum(parameter.numel() for parameter in model.parameters()) <= _LARGE
    if is_small and arguments.method != "qlora" and not on_meta:  # weights in 4 bits are simulated alone
        model = random_model(arguments.model)
        with running(model, is_random=arguments.batch is None), restored(model), torch.no_grad():
            call_with(model, batch)
    elif arguments.batch is None:
        if (positions := usable_positions(model)) is not None and arguments.length > positions:
            raise ValueError(f"length must be at most {positions}, the positions of the model, got {arguments.length}.")
        batch.pop("attention_mask")  # one without values stands for any mask
        batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), batch)
    dtype = getattr(arguments, "adapters", str(next(model.parameters()).dtype).removeprefix("torch."))
    return for_training(model, arguments.method, rank=arguments.rank, dtype=dtype), batch


def for_training(model: nn.Module, method: str, *, rank: int, dtype: str) -> nn.Module:
    """Add what a method trains to a model, which is on the meta device for "qlora"."""
    if method == "full":
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError(f"--method {method} needs PEFT, which is not installed. Run pip install peft.") from error
    adapters = LoraConfig(r=rank, target_modules="all-linear")
    with next(model.parameters()).device, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages about one another
        adapted: Any = get_peft_model(model, adapters, autocast_adapter_dtype=False)  # pyright: ignore[reportArgumentType]
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(ADAPTERS[dtype])
    if method == "qlora":
        as_quantised(adapted)
    return adapted
