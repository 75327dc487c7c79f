"""Count dropout and attention as on a GPU, and what flash attention's backward pass takes there beside its results.

The kernel sums the gradient of the queries in float32, and where several heads share a key it makes the gradients of
keys and values for every head, and adds them up: 33 kB per token for 32 heads of 128 that share 8 keys, in 16 bits.

Source: ``mha_bwd`` in PyTorch's aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, the kernels of Dao
2023 (arXiv 2307.08691), and ``_flash_attention_backward`` in attention_backward.cu beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

_BACKWARD = "_scaled_dot_product_flash_attention_backward"
_OF_CPU = "_scaled_dot_product_flash_attention_for_cpu_backward"
_HALF = 2
_ROWS, _WIDTH, _NARROW, _WIDE = 128, 32, 128, 64  # what the kernel rounds to; heads wider than 128 to 64


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Let fake tensors of the CPU save for dropout what a GPU saves, a mask in bytes, and of attention no scores.

    The CPU's fused attention has no dropout, so that with one there are all scores. A mode of PyTorch's functions is
    off where a backward pass runs modules again, so these two are replaced, for fake tensors alone.
    """
    attention, dropout = F.scaled_dot_product_attention, F.dropout

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *given: Any, **named: Any) -> Any:
        if has_torch_function((query, key, value)):  # whom modes ask for, by its name, is this function
            return handle_torch_function(attend, (query,), query, key, value, attn_mask, *given, **named)
        named |= dict(zip(("dropout_p", "is_causal"), given, strict=False))
        named |= {"dropout_p": 0.0} if _is_fake(query) else {}
        return attention(query, key, value, attn_mask, **named)

    def drop(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if has_torch_function((input,)):
            return handle_torch_function(drop, (input,), input, p=p, training=training, inplace=inplace)
        if not (training and 0 < p < 1 and not inplace and _is_fake(input)):
            return dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    vars(attend)["rmm_is_local"] = True
    F.scaled_dot_product_attention, F.dropout = attend, drop
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.dropout = attention, dropout


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"


def flash_workspace(func: Any, args: Any, *, is_meta: bool) -> int:
    """Return the bytes; 0 for other operators. With ``is_meta`` the CPU's operator stands for a GPU's."""
    if func.namespace != "aten" or func._opname not in ((_BACKWARD, _OF_CPU) if is_meta else (_BACKWARD,)):
        return 0
    gradient, query, key, _, output = args[:5]
    if query.itemsize != _HALF:
        return 0  # the kernel has 16 bits alone
    batch, heads, rows, width = query.shape
    rows, width = _up(rows, _ROWS), _up(width, _WIDTH if width <= _NARROW else _WIDE)
    found = batch * heads * rows * (width + 1) * torch.float32.itemsize  # with a sum per row
    if key.shape[1] != heads:
        found += 2 * (key.numel() // key.shape[1]) * heads * key.itemsize
    return found + sum(one.numel() * one.itemsize for one in (gradient, output) if not _is_contiguous(one))


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


def _is_contiguous(tensor: Tensor) -> bool:
    """Say whether the kernel, whose heads follow positions, need not copy what it is given."""
    return tensor.transpose(1, 2).is_contiguous()
