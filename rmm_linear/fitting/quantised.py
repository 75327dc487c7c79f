"""Let a model on the meta device count as QLoRA trains it, without a package that quantizes.

Frozen linear layers get a stand-in: a weight of two numbers per byte, and scales as bitsandbytes keeps them. A block of
64 weights has an absolute maximum, in float32 or, as QLoRA does it, in 8 bits with a scale in float32 for 256 of them:
1/2 + 1/64 + 4/(64 · 256) = 0.516 bytes per parameter, instead of 0.5 + 4/64 = 0.563. Every product dequantizes the
weight to a temporary of the layer's dtype, in the forward pass (y = x Wᵀ) and again in the backward pass (dX = dY W),
and saves nothing but the packed weight, which is there anyway. Without values, a stand-in can only be simulated.

Source: Dettmers et al. 2023, "QLoRA: Efficient finetuning of quantized LLMs" (arXiv 2305.14314).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from rmm_linear.conversion.linears import linear_features
from rmm_linear.conversion.names import is_conv1d, output_heads

_NESTED = 256  # absolute maxima that are quantized together
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class QuantizedLinear(nn.Module):
    """The place of a frozen linear layer whose weight is in 4 bits; it has shapes and no values."""

    def __init__(
        self, inputs: int, outputs: int, bias: nn.Parameter | None, dtype: torch.dtype, blocksize: int, *, double: bool
    ) -> None:
        """Make a stand-in on the meta device; ``dtype`` is that of products, and of the weight before."""
        super().__init__()
        self.in_features, self.out_features, self.compute_dtype = inputs, outputs, dtype
        size = inputs * outputs
        blocks = -(-size // blocksize)
        packed = torch.empty((size + 1) // 2, 1, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)  # packed, two numbers per byte, shape (O · I / 2, 1)
        self.bias = bias
        kind = torch.uint8 if double else torch.float32
        # Absolute maximum of every block of weights; in 8 bits with double quantization
        self.absmax = torch.empty(blocks, device="meta", dtype=kind)
        # Scales of absolute maxima in 8 bits, or None. Both are no buffers, as in bitsandbytes: a recomputation keeps
        # buffers as the first run saw them, and Shards leaves these whole.
        self.scale = torch.empty(-(-blocks // _NESTED), device="meta", dtype=torch.float32) if double else None

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta and not isinstance(x, FakeTensor):
            raise RuntimeError(
                "A stand-in for a quantized layer has shapes and no values, got real tensors. Simulate the model, or "
                "load it with bitsandbytes to train it."
            )
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return _Product.apply(x.to(self.compute_dtype), bias, self).to(x.dtype)

    def dequantized(self) -> Tensor:
        """Return a whole weight, which takes the absolute maxima in float32 while it is made."""
        scales = self.absmax.float()
        made = self.weight.new_empty(self.out_features, self.in_features, dtype=self.compute_dtype)
        del scales
        return made

    def extra_repr(self) -> str:
        """Return sizes, as those of ``nn.Linear``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class _Product(torch.autograd.Function):
    """A product with a weight that is dequantized each time.

    The layer is an attribute, as the state is in bitsandbytes: what offloads or recomputes saved tensors has none here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        with torch._C._DisableAutocast():  # of any device
            return F.linear(x, layer.dequantized(), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        needs_x, needs_bias, _ = ctx.needs_input_grad
        dx = torch.matmul(grad, ctx.layer.dequantized()) if needs_x else None
        return dx, grad.flatten(end_dim=-2).sum(0) if needs_bias else None, None


def as_quantised(
    model: nn.Module, *, blocksize: int = 64, double: bool = True, compute_dtype: torch.dtype | None = None
) -> list[str]:
    """Replace the frozen linear layers of a model on the meta device by stand-ins with weights in 4 bits.

    Layers that train, the head, what comes last in the model, and layers that share their weight with another module
    stay, as they do by default in transformers; so do embeddings and norms. Freeze the model before: with PEFT, make
    the adapters first (``get_peft_model`` with ``target_modules="all-linear"``), then call this.

    model: It is changed. blocksize: Weights with one absolute maximum. double: Whether absolute maxima are quantized
    too (``bnb_4bit_use_double_quant``). compute_dtype: Of products (``bnb_4bit_compute_dtype``); None is the weight's.

    Returns the names of the layers that are replaced.
    """
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear or is_conv1d(module)}
    heads, users = {*output_heads(model), *_last(model)}, _users(model)
    chosen = {
        name: module
        for name, module in layers.items()
        if name and not module.weight.requires_grad and module not in heads and users[id(module.weight)] == 1
    }
    if not chosen:
        raise ValueError(
            f"as_quantised needs frozen linear layers besides the head, got {len(layers)} linear layers, of which none "
            "is. Call get_peft_model first, or requires_grad_(False)."
        )
    real = next((name for name, module in chosen.items() if not module.weight.is_meta), None)
    if real is not None:
        raise ValueError(
            f"as_quantised needs a model on the meta device, got {real} on {chosen[real].weight.device}. Make it under "
            'torch.device("meta"), or load it with bitsandbytes.'
        )
    instead = {module: _stand_in(module, blocksize, compute_dtype, double=double) for module in chosen.values()}
    for parent in [*model.modules()]:
        for name, child in parent._modules.items():
            if child in instead:
                parent._modules[name] = instead[child]
    return list(chosen)


def _stand_in(layer: Any, blocksize: int, compute_dtype: torch.dtype | None, *, double: bool) -> QuantizedLinear:
    dtype = compute_dtype or layer.weight.dtype
    made = QuantizedLinear(*linear_features(layer), layer.bias, dtype, blocksize, double=double)
    return made.train(layer.training)


def _last(model: nn.Module) -> list[nn.Module]:
    """List the modules in the last part of a model, below its wrappers: the head; none if that is a list of blocks."""
    while len(children := list(model.children())) == 1:
        (model,) = children
    last = [] if isinstance(model, _LISTS) else [module for part in children[-1:] for module in part.modules()]
    return [] if any(isinstance(module, nn.ModuleList) for module in last) else last


def _users(model: nn.Module) -> dict[int, int]:
    """Count the modules that have a parameter, by its identity."""
    found: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            found[id(parameter)] = found.get(id(parameter), 0) + 1
    return found
