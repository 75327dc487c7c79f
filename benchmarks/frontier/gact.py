"""All that autograd saves in few bits: the rule of GACT, with this package's packing.

Source: Liu et al. 2022 (arXiv 2206.11357), level L1 of their code: whatever operations save is packed when it is saved,
4 bits per element with a scale and an offset per group, rounded without bias. Tensors are floating point, have two to
four dimensions and a gradient; parameters stay; masks of dropout take a bit. What is theirs is the rule: groups are
ours, 64 elements that are rotated before rounding, where theirs are 256. A tensor that several operations save is
packed once, which their code leaves off unless it is asked for.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.library import APPLY_MASK, GROUP, PACK, PACK_MASK, UNPACK, draw_seed, mix, peek_seed, storage_key

_DIMENSIONS = (2, 3, 4)


class PackedSaves:
    """The hooks that pack what autograd saves, and what they have packed already."""

    def __init__(self, model: nn.Module, bits: int) -> None:
        self._model, self._bits = model, bits
        self._own = set[Any]()
        self._packed = dict[Any, Any]()

    def __enter__(self) -> None:
        self._own = {storage_key(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())}
        self._seed, self._count = peek_seed(), 0  # numbers drawn on the way would shift the masks of dropout
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def __exit__(self, *_: Any) -> None:
        self._hooks.__exit__()
        self._packed.clear()
        draw_seed()  # so that the next step has others

    def _pack(self, tensor: Tensor) -> Any:
        if not tensor.is_floating_point() or storage_key(tensor) in self._own or tensor.dim() not in _DIMENSIONS:
            return tensor
        if not tensor.requires_grad:
            return _packed_mask(tensor)
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version)
        if key not in self._packed:
            self._count += 1
            seed = torch.tensor([mix(self._seed, self._count)], device=tensor.device)
            flat = tensor.detach().reshape(-1)
            rows = F.pad(flat, (0, -len(flat) % GROUP)).view(-1, GROUP)
            self._packed[key] = (*PACK(rows, self._bits, seed), seed, tensor.shape, tensor.dtype)
            # Its address may be another tensor's after that.
            weakref.finalize(storage, self._packed.pop, key, None).atexit = False
        return self._packed[key]

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if len(saved) == 3:
            bits, scale, shape = saved
            return APPLY_MASK(scale.expand(shape).reshape(-1, shape[-1]), bits, 1.0).view(shape)
        codes, scales, seed, shape, dtype = saved
        return UNPACK(codes, scales, seed, self._bits, GROUP, dtype).flatten()[: shape.numel()].view(shape)


def _packed_mask(tensor: Tensor) -> Any:
    """A tensor of zeros and one other number, as dropout saves on a CPU, in bits; any other stays."""
    if not tensor.numel():
        return tensor
    rows, scale = tensor.reshape(-1, tensor.shape[-1]), tensor.max()
    if not torch.equal((rows != 0) * scale, rows):
        return tensor
    return PACK_MASK(rows), scale, tensor.shape


def use_gact(model: nn.Module, bits: int = 4) -> None:
    """Pack what a model's forward pass saves, from now on."""
    set_attention: Any = getattr(model, "set_attn_implementation", None)
    if set_attention is not None:
        set_attention("eager")
    forward = model.forward

    @functools.wraps(forward)
    def packing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with PackedSaves(model, bits):
            return forward(*args, **kwargs)

    model.forward = packing  # pyright: ignore[reportAttributeAccessIssue]
