"""Count floating-point operations, and tell products from other operators."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from rmm_linear.planning.step.step import prepared

_aten = torch.ops.aten

_FUSED = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def _packets(*names: str) -> frozenset[Any]:
    return frozenset(packet for name in names if (packet := getattr(_aten, name, None)) is not None)


# Most of the time of long sequences. Their results are the output and a number per row and head.
ATTENTIONS = _packets(*_FUSED)
# Products: most of the time and little of the memory. Selective recomputation saves their results.
PRODUCTS = _packets("mm", "addmm", "bmm", "baddbmm", "convolution", *_FUSED)


def by_plain(planned: int, plain: int) -> float:
    """Divide operations, also of models that have none."""
    return planned / plain if plain else 1.0


def count_flops(model: nn.Module, example: Any) -> int:
    """Count the floating-point operations of a step, recomputation included."""
    # By itself: with live bytes counted at once, gradients of fake tensors appear twice.
    with prepared(model, example) as step, flop_counter() as counter:
        step()
    return counter.get_total_flops()


@functools.cache
def _counters() -> dict[Any, Any]:
    """What counts the operations of an operator; made when it is asked for first, not at import."""
    return flop_counter().flop_registry


def operations(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Return the operations of a call of an operator; 0 for those that no formula is known of."""
    count = _counters().get(getattr(func, "overloadpacket", None))
    return 0 if count is None else count(*args, **(kwargs or {}), out_val=output)


def moved(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Return the bytes that a call of an operator reads and writes, each tensor once; views move none."""
    if func.is_view:
        return 0
    tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, Tensor)}
    return sum(one.numel() * one.itemsize for one in tensors.values())


def attention_flops(counter: FlopCounterMode) -> int:
    """Return the operations of fused attention that were counted so far."""
    return sum(count for operator, count in counter.flop_counts["Global"].items() if operator in ATTENTIONS)


def flop_counter() -> FlopCounterMode:
    """Return a counter that knows the CPU's fused attention too, and products of groups of rows."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def forward_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(query, key, value)

    def backward_flops(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_backward_flop_count(gradient, query, key, value)

    known: dict[Any, Any] = {attention: forward_flops, backward: backward_flops}
    if (grouped := getattr(torch.ops.aten, "_grouped_mm", None)) is not None:
        known[grouped] = _grouped_flops
    return FlopCounterMode(display=False, custom_mapping=known)


def _grouped_flops(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    """Rows, columns, or what is summed over, of two dimensions are those of all groups together."""
    batch = a[0] if len(a) == len(b) == 3 else 1
    return 2 * batch * math.prod(a[-2:]) * b[-1]
