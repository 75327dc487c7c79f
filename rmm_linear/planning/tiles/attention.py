"""Run the backward pass of flash attention by groups of heads, which takes less beside its results.

What its kernel takes on a GPU (:mod:`rmm_linear.planning.step.flash`) is there for all heads at once, and more than all
else that a transformer's layer in tiles has alive by then. Heads do not read one another, so the backward pass of some
of them at a time has the same gradients, and takes that for some of them. The forward pass runs as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rmm_linear.planning.replay.wrapped import Wrapped
from rmm_linear.planning.step.ring import current_ring

_aten = torch.ops.aten
_FLASH, _DEVICES, _HALF = 1, ("cuda", "cpu"), 2  # the number of PyTorch's backend, who has it, and bytes
_WIDTH = 8  # PyTorch pads other heads to a multiple of it
# Rows of all heads of a group: 512 blocks of 128, which keep some 130 processors busy several times over.
_ROWS = 2**16


class GroupedHeads(Wrapped):
    """The forward pass of a module whose flash attention runs its backward pass by groups of heads."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_off or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        with _Grouping():
            return self.inner(*args, **kwargs)


def heads_of(block: nn.Module) -> list[GroupedHeads]:
    """Make what groups the heads of a block with parts, for a plan to attach; on a CPU there is nothing to save."""
    device = next((one.device.type for one in block.parameters()), "cpu")
    return [GroupedHeads(block)] if device != "cpu" and any(True for _ in block.children()) else []


class _Grouping(TorchFunctionMode):
    """Takes the calls of attention that run by groups of heads."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            found = _grouped(*args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)


def _grouped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return attention's output; None where it runs as before."""
    kind = query.device.type
    if current_ring() is not None:
        return None  # its ranks run attention in rounds of their own
    if torch.is_autocast_enabled(kind):
        query, key, value = (one.to(torch.get_autocast_dtype(kind)) for one in (query, key, value))
    given = query, key, value
    if attn_mask is not None or dropout_p or kind not in _DEVICES or not any(one.requires_grad for one in given):
        return None
    if type(query) not in (Tensor, FakeTensor) or key.shape != value.shape or (groups := groups_of(query, key)) < 2:
        return None
    if key.shape[1] != query.shape[1] and not enable_gqa:
        return None
    if type(query) is Tensor:  # for fake ones, nothing but the CPU's is there
        choice = _aten._fused_sdp_choice(*given, None, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        if choice != _FLASH:
            return None
    return FlashByHeads.apply(*given, is_causal, scale, groups)


def groups_of(query: Tensor, key: Tensor) -> int:
    """Return the number of groups: as many as divide the heads of the keys and leave enough rows in each."""
    if query.dim() != 4 or query.itemsize != _HALF or query.shape[::3] != key.shape[::3]:
        return 1  # another kernel's
    if query.shape[1] % key.shape[1] or query.shape[-1] % _WIDTH:
        return 1
    rows = query.numel() // query.shape[-1]
    return max(n for n in range(1, key.shape[1] + 1) if key.shape[1] % n == 0 and (n == 1 or rows >= n * _ROWS))


class FlashByHeads(torch.autograd.Function):
    """Flash attention, whose backward pass runs by groups of heads; queries (B, H, T, D), keys (B, H / n, S, D)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, groups: int
    ) -> Tensor:
        if query.device.type == "cpu":
            found = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
            (output, sums), others, ctx.lengths = found, (), None
        else:
            found = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
            output, sums, _, _, *lengths, state, unused, _ = found
            others, ctx.lengths = (state, unused), lengths
        ctx.save_for_backward(query, key, value, output, sums, *others)
        ctx.is_causal, ctx.scale, ctx.groups = is_causal, scale, groups
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Run the backward pass of one group after the other."""
        query, key, value, output, sums, *others = ctx.saved_tensors
        found = [torch.empty_like(one) for one in (query, key, value)]
        for group in range(ctx.groups):

            def part(whole: Tensor, group: int = group) -> Tensor:
                share = whole.shape[1] // ctx.groups
                return whole.narrow(1, group * share, share)

            given = [*map(part, (gradient, query, key, value, output)), part(sums).contiguous()]
            if ctx.lengths is None:
                parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *given, 0.0, ctx.is_causal, scale=ctx.scale
                )
            else:  # all rows of a batch have one length
                parts = _aten._scaled_dot_product_flash_attention_backward(
                    *given, None, None, *ctx.lengths, 0.0, ctx.is_causal, *others, scale=ctx.scale
                )
            for whole, one in zip(found, parts, strict=True):
                part(whole).copy_(one)
            del given, parts, one  # before those of the next group are made
        return *found, None, None, None
