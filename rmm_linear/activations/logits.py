"""ChunkedHead, the output layer of a language model whose loss needs no logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rmm_linear._support.autocast import autocast_dtype
from rmm_linear._support.distributed import is_fsdp_module, running_ddp
from rmm_linear.activations.base import PackedModule
from rmm_linear.activations.lazy_logits import LazyLogits, Source
from rmm_linear.losses import CHUNK


class ChunkedHead(PackedModule):
    """The output layer of a language model, whose logits the loss does not need as a whole.

    In training, the model's own ``forward`` computes the same loss through
    :func:`rmm_linear.losses.chunked_cross_entropy`, whatever its definition is: which labels are shifted or ignored,
    and what the sum is divided by, is the model's own code. Its output has the logits still: they are computed when
    they are read, which must happen before the optimizer's step. A loss that is no plain cross entropy of the logits,
    or of logits changed in another way than by views, casts to float, a factor or a cap, reads them.

    In eval mode, without gradients, in compiled code, for 256 rows or fewer, where it is sharded by itself, where it
    has backward hooks, and under DDP with ``static_graph=True``, it is the original layer. A forward pass without
    labels computes the logits at its end under FSDP2, which may shard the weight then, and under DDP with
    ``find_unused_parameters=True``, which looks at the graph of the outputs.
    """

    rmm_operation = "logits"
    rmm_learns_rows = False
    weight: Tensor
    bias: Tensor | None
    # Rows of logits at a time, None for as many as the device takes; as few have their logits at once
    rmm_chunk: int | None = None

    def exact_forward(self, input: Tensor) -> Tensor:
        return super().forward(input)  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, input: Tensor) -> Tensor:
        """Return logits that are computed when they are read, from last hidden states of shape (*, H)."""
        needs_gradient = input.requires_grad or self.weight.requires_grad
        is_lazy = self.training and torch.is_grad_enabled() and needs_gradient and not torch.compiler.is_compiling()
        # Where FSDP or ZeRO-3 shards this layer by itself, the weight is there during its own forward only.
        is_sharded = is_fsdp_module(self) or hasattr(self.weight, "ds_id")
        is_hooked = bool(self._backward_hooks or self._backward_pre_hooks)
        is_small = input.numel() <= (self.rmm_chunk or CHUNK) * input.shape[-1]
        if not is_lazy or is_sharded or is_hooked or is_small:
            return self.exact_forward(input)
        used: list[None] = []
        if not self._can_wait(used):
            return self.exact_forward(input)
        autocast = autocast_dtype(input.device.type, input.dtype)
        weight, dtype = self.weight, autocast or input.dtype
        return LazyLogits(Source(input, self, weight, weight._version, input, dtype, autocast, used))

    def _can_wait(self, used: list[None]) -> bool:
        """Say whether logits may be read after the forward pass; arranges that they are read at its end where not."""
        ddp = running_ddp()
        outermost = None if self.rmm_context is None else self.rmm_context.outermost
        looks_at_graph = ddp is not None and ddp.find_unused_parameters
        if ddp is not None and (ddp.static_graph or (looks_at_graph and outermost is None)):
            return False
        if outermost is not None and (looks_at_graph or is_fsdp_module(outermost)):

            def finish(module: nn.Module, args: Any, output: Any) -> Any:
                handle.remove()
                return output if used else tree_map_only(LazyLogits, LazyLogits.read, output)

            handle = outermost.register_forward_hook(finish, prepend=True, always_call=True)
        return True
