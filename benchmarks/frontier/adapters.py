"""What adapters need: a base in 4 bits, our variant of LoRA, and the noise of PEFT's variants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from benchmarks.library import Passes, measuring

_WHOLE = "whole gradient"


def quantize(model: nn.Module) -> None:
    """Store the weights of all linear layers but the head in 4 bits (bitsandbytes' nf4), as QLoRA does."""
    from bitsandbytes.nn.modules import Linear4bit, Params4bit

    found = [name for name, one in model.named_modules() if type(one) is nn.Linear and name != "lm_head"]
    for name in found:
        layer: Any = model.get_submodule(name)
        sizes = layer.in_features, layer.out_features
        made = Linear4bit(*sizes, bias=False, compute_dtype=layer.weight.dtype, quant_type="nf4")
        made.weight = Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")  # pyright: ignore[reportCallIssue]
        made.support_avx512bf16_for_cpu = False  # else evaluations repack it for inference, and so it stays
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, made.to("cpu"))  # quantizes


def sketched_lora(model: nn.Module, rank: int) -> nn.Module:
    import peft

    from rmm_linear.integrations.peft import SketchedLoraConfig

    config = SketchedLoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    return peft.get_peft_model(model, config)  # pyright: ignore[reportArgumentType]


def has_variants(model: nn.Module) -> bool:
    return any(getattr(module, "lora_variant", None) for module in model.modules())


@contextmanager
def _plain(model: nn.Module) -> Iterator[None]:
    """Make PEFT's variants of LoRA plain LoRA, inside of the block."""
    known = [(module, module.lora_variant) for module in model.modules() if getattr(module, "lora_variant", None)]
    for module, _ in known:
        module.lora_variant = {}  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    try:
        yield
    finally:
        for module, variant in known:
            module.lora_variant = variant


def variant_noise(model: nn.Module, rows: Mapping[str, Any], draws: int) -> dict[str, tuple[float, float]]:
    """Return Σ ‖ĝ − g‖² of a variant, g the gradient of plain LoRA, and Σ D²_SGD.

    Of a variant that is not random it is the square of its bias.
    """
    with measuring(model):
        with _plain(model):
            passes = Passes(model, rows)
            exact, sgd = passes.gradients(), passes.sgd_variance()
        noise = 0.0
        for draw in range(draws):
            torch.manual_seed(draw)
            passes.states = {torch.device("cpu"): torch.get_rng_state()}
            noise += sum(float((a - b).double().square().sum()) for a, b in zip(passes.gradients(), exact, strict=True))
    return {_WHOLE: (noise / draws, sum(sgd.values()))}
