"""Say in a sentence each what a model and a batch are that train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from rmm_linear.context.checkpointing import is_checkpointed
from rmm_linear.conversion.exact import converted_modules
from rmm_linear.fitting.remedies import class_of
from rmm_linear.memory.quantized import is_of
from rmm_linear.planning.blocks.plan import BlockPlan, label_of


def described(model: nn.Module, *, is_checkpointed_later: bool = False) -> str:
    """Describe the weights of a model, and what saves memory in it already."""
    parameters = list(model.parameters())
    packed: list[Any] = [module for module in model.modules() if is_packed(module)]
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    total = sum(p.numel() for p in parameters)
    total += sum(module.in_features * module.out_features - module.weight.numel() for module in packed)
    dtypes = ", ".join(dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in parameters))
    text = f"{total:,} parameters ({dtypes}), "
    text += (
        "all trained" if trained == total else f"{trained:,} trained ({trained / max(total, 1):.2%}), the others frozen"
    )
    if adapters := sum(hasattr(module, "lora_A") for module in model.modules()):
        text += f", {adapters} layers with LoRA"
    if quantised := len(packed) + sum(is_of(p) for p in parameters if p.is_floating_point()):
        text += f", {quantised} weights quantized"
    if attention := getattr(getattr(model, "config", None), "_attn_implementation", None):
        text += f"; attention: {attention}"
    text += f"; checkpointing: {'on' if is_checkpointed(model) else 'off'}{', on in training' * is_checkpointed_later}"
    plan = vars(model).get("rmm_plan")
    if isinstance(plan, BlockPlan):
        text += f"; plan: {', '.join(dict.fromkeys(label_of(block.option) for block in plan.blocks))}"
    elif converted := len(converted_modules(model)):
        text += f"; {converted} modules converted"
    return f"{text}."


def described_batch(example: Any, optimizer: Any, *, accumulate: bool = False) -> str:
    leaves = tree_leaves(example.batch if hasattr(example, "batch") else example)
    shapes = [tuple(one.shape) for one in leaves if isinstance(one, torch.Tensor) and one.dim()]
    shape = " × ".join(map(str, shapes[0])) if shapes else "of a function"
    kind = class_of(optimizer)
    counted = "no optimizer is counted" if kind is None else f"optimizer: {kind.__name__}"
    return f"Batch {shape}; {counted}{'; gradients accumulate' if accumulate else ''}."


def is_packed(module: nn.Module) -> bool:
    """Say whether a linear layer, and no wrapper of one, has several weights in a number."""
    weight = module._parameters.get("weight")
    is_integer = weight is not None and not weight.dtype.is_floating_point
    return is_integer and hasattr(module, "in_features") and hasattr(module, "out_features")
