"""Find what quantized layers hold: packed weights, and scales and codes outside of parameters and buffers.

bitsandbytes is known by the classes of its parameters and operators, and is not imported. Its weights on the meta
device are not quantized yet, as that happens on the way to a device; they count as they will be there. Other packages
are known by name alone: tensors in attributes of their layers and weights are their state. A tensor subclass that
consists of other tensors, such as torchao's, counts as these (:func:`rmm_linear.memory.peak.storages`).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Packages with layers; the last has stand-ins for those of bitsandbytes.
QUANTIZERS = (
    "bitsandbytes", "auto_gptq", "gptqmodel", "awq", "hqq", "optimum.quanto", "rmm_linear.fitting.quantised",
)  # fmt: skip
_OF_MODULES = frozenset(vars(nn.Module()))
_NESTED = 256  # absolute maxima of blocks that bitsandbytes quantizes together
_CODES, _NESTED_CODES = 16, 256
_PACKS_ON_CPU = "support_avx512bf16_for_cpu"


def is_of(thing: Any, packages: tuple[str, ...] = QUANTIZERS) -> bool:
    """Say whether an object, or a class that it derives from, is of some packages."""
    return any(f"{kind.__module__}.".startswith(tuple(f"{name}." for name in packages)) for kind in type(thing).__mro__)


def as_held(parameter: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return what a device has of a parameter, and the tensors that it keeps in attributes.

    Of one on the meta device that bitsandbytes quantizes, this is what will be there.
    """
    if not is_of(parameter):
        return parameter, []
    packed, kept = _packed(parameter) if _awaits_quantization(parameter) else (parameter, vars(parameter))
    return packed, [*_tensors(kept)]


def states(model: nn.Module) -> Iterator[Tensor]:
    """Go through the tensors that quantized layers keep in attributes."""
    for module in model.modules():
        if is_of(module):
            yield from _tensors({name: value for name, value in vars(module).items() if name not in _OF_MODULES})


def replaced_weight(parameter: Tensor, replace: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a quantized weight of plain tensors, packed, whose attributes have replaced tensors too."""
    if _awaits_quantization(parameter):
        packed, kept = _packed(parameter)
    else:
        packed, kept = parameter.detach().as_subclass(Tensor), vars(parameter)
    made = nn.Parameter(replace(packed), requires_grad=parameter.requires_grad)
    vars(made).update({name: replaced(value, replace) for name, value in kept.items()})
    return made


@contextmanager
def replaced_states(model: nn.Module, replace: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace the tensors in attributes of quantized layers inside the block; all their attributes are restored."""
    with undisturbed(model) as layers:
        for layer in layers:
            own = {name: value for name, value in vars(layer).items() if name not in _OF_MODULES}
            vars(layer).update({name: replaced(value, replace) for name, value in own.items()})
        yield


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Let quantized layers run inside the block, and restore their attributes after it.

    Layers of bitsandbytes take the dtype of products from the first input that they see. On some CPUs they pack weights
    in another way in eval mode, for good, and no gradient comes back through these: not inside the block.
    """
    layers = [module for module in model.modules() if is_of(module)]
    before = [dict(vars(layer)) for layer in layers]
    try:
        for layer in layers:
            if hasattr(layer, _PACKS_ON_CPU):
                setattr(layer, _PACKS_ON_CPU, False)
        yield layers
    finally:
        for layer, attributes in zip(layers, before, strict=True):
            for name in vars(layer).keys() - attributes.keys():
                del vars(layer)[name]
            vars(layer).update(attributes)


def dequantized_bytes(operator: Any, args: Any, kwargs: Any) -> int:
    """Return the bytes of the weight that an operator of bitsandbytes dequantizes and frees while it runs.

    For few rows of some shapes, bitsandbytes has kernels on CUDA that dequantize nothing; they are counted alike.
    """
    if operator._schema.name != "bitsandbytes::gemm_4bit":
        return 0
    names = (argument.name for argument in operator._schema.arguments)
    x, _, shape, absmax, blocksize, *_ = args
    given = dict(zip(names, args, strict=False)) | (kwargs or {})
    size = shape[0] * shape[1]
    scales = 2 * -(-size // blocksize) if given.get("absmax_8bit") is not None else 0  # without and with their offset
    return size * x.dtype.itemsize + scales * absmax.dtype.itemsize


def _awaits_quantization(parameter: Any) -> bool:
    """Say whether a weight on the meta device is one that bitsandbytes quantizes on the way to another."""
    if not parameter.is_meta or not is_of(parameter, ("bitsandbytes",)):
        return False
    is_in_4_bits = hasattr(parameter, "bnb_quantized") and not parameter.bnb_quantized
    return is_in_4_bits or (getattr(parameter, "has_fp16_weights", True) is False and parameter.dtype != torch.int8)


def _packed(parameter: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return a weight as bitsandbytes will quantize it, and the attributes that it will have, on the meta device."""
    if not hasattr(parameter, "bnb_quantized"):
        rows = torch.empty(parameter.shape, dtype=torch.int8, device="meta")
        return rows, {**vars(parameter), "CB": rows, "SCB": _meta(parameter.shape[0])}
    blocks = -(-parameter.numel() // parameter.blocksize)
    storage = parameter.quant_storage
    packed = torch.empty((parameter.numel() + 1) // (2 * storage.itemsize), 1, dtype=storage, device="meta")
    made = sys.modules["bitsandbytes"].functional.QuantState
    nested = None
    if parameter.compress_statistics:
        nested = made(_meta(-(-blocks // _NESTED)), code=_meta(_NESTED_CODES), blocksize=_NESTED, dtype=torch.float32)
    state = made(
        _meta(blocks, dtype=torch.float32 if nested is None else torch.uint8),
        shape=parameter.shape,
        code=_meta(_CODES),
        blocksize=parameter.blocksize,
        quant_type=parameter.quant_type,
        dtype=parameter.dtype,
        offset=None if nested is None else _meta(),
        state2=nested,
    )
    return packed, {**vars(parameter), "quant_state": state, "bnb_quantized": True}


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, nn.Module):  # weights of bitsandbytes know their layer
        return
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif is_of(value) and hasattr(value, "__dict__"):
        yield from _tensors(vars(value))


def replaced(value: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """Replace the tensors in an attribute, also those inside of containers and of a quantizer's own objects."""
    if isinstance(value, nn.Module):
        return value
    if isinstance(value, Tensor):
        return replace(value)
    if isinstance(value, dict):
        return {name: replaced(each, replace) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replaced(each, replace) for each in value)
    if is_of(value) and hasattr(value, "__dict__"):
        made = copy.copy(value)
        vars(made).update({name: replaced(each, replace) for name, each in vars(value).items()})
        return made
    return value
