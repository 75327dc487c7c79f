"""Models whose frozen linear layers are quantized: by bitsandbytes, by stand-ins, and by a tensor subclass."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what PEFT imports
    from peft import LoraConfig, get_peft_model

WORDS, BATCH, TOKENS = 100, 2, 32
SHAPE = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 512}
LAYERS = 7


def llama(device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, use_cache=False, **SHAPE)).to(
            dtype
        )


def batch(device: str = "cpu") -> dict[str, Tensor]:
    ids = torch.randint(5, WORDS, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    return {"input_ids": ids, "labels": ids}


def with_adapters(model: nn.Module) -> Any:
    """Put adapters on all linear layers but the head."""
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).train()  # type: ignore[arg-type]


def in_bitsandbytes(model: nn.Module, bits: int, *, double: bool = True, device: str = "cpu") -> nn.Module:
    """Replace all linear layers but the head, as transformers does, and move the model to a device."""
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

    for name, module in [*model.named_modules()]:
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        sizes, dtype = (module.in_features, module.out_features, module.bias is not None), module.weight.dtype
        with torch.device(module.weight.device):
            if bits == 4:
                made: nn.Linear = Linear4bit(*sizes, dtype, double, "nf4")
                made.weight = Params4bit(module.weight.data, compress_statistics=double, quant_type="nf4", module=made)
            else:
                made = Linear8bitLt(*sizes, has_fp16_weights=False)
                made.weight = Int8Params(module.weight.data, requires_grad=False)
        made.bias = module.bias
        model.set_submodule(name, made)
    model.requires_grad_(False)
    setattr(model, f"is_loaded_in_{bits}bit", True)
    return model.to(device)


class Coded(Tensor):
    """A weight in 8 bits with a scale per row, which replaces products by code of its own."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes, scale):
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __repr__(self):
        return "Coded()"

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.codes.to(weight.scale.dtype) * weight.scale, *bias, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default):
            return cls(func(args[0].codes), func(args[0].scale))
        raise NotImplementedError(str(func))


def coded(layer: nn.Linear) -> nn.Linear:
    """Give a layer a frozen weight that is a tensor subclass."""
    weight = layer.weight.detach()
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).to(torch.int8) if not weight.is_meta else torch.empty_like(weight, dtype=torch.int8)
    layer.weight = nn.Parameter(Coded(codes, scale), requires_grad=False)
    return layer
