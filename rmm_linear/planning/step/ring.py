"""Count what ring attention takes beside its results, where ranks divide the sequence.

Every rank has its part of the queries, keys and values, (B, H, T / n, D). In n rounds it computes attention of its
queries with the keys and values of one rank after the other, merges the outputs in float32 by their sums, and in the
backward pass hands the gradients of keys and values on, in float32. Halves of parts are left out by the causal mask:
a rank has one part from the head of the sequence and one from its tail. All as in PyTorch's
``torch.distributed.tensor.experimental._attention`` (2.13), after Liu et al. 2023 (arXiv 2310.01889): what is alive
at its moments is counted here tensor by tensor, for the rank that has most.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rmm_linear.planning.step.shards import GATHER, Shards

_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_FORWARD = {f"_scaled_dot_product_{kernel}" for kernel in _KERNELS}
_BACKWARD = {f"{name}_backward" for name in _FORWARD}


@dataclass
class Ring:
    """The ring of a step."""

    ranks: int  # in the ring
    gathers: bool  # whether keys and values of all ranks come at once
    is_used: bool = False  # whether attention has run in it

    def workspace(self, func: Any, args: Any, kwargs: Any, flash: int) -> int:
        """Return the bytes of one operator; ``flash`` are those that its kernel takes. 0 for other operators."""
        name = getattr(func, "_opname", "")
        if name in _FORWARD:
            return 0 if (kwargs or {}).get("attn_mask") is not None else self._forward(*args[:3])
        return self._backward(args[1], args[2], args[3], flash) if name in _BACKWARD else 0

    def _forward(self, query: Tensor, key: Tensor, value: Tensor) -> int:
        self.is_used = True
        pairs, copies = key.nbytes + value.nbytes, _copies(key, value)
        came = pairs * (self.ranks if self.gathers else 1)
        first = copies + pairs + came  # while the first round runs: what is sent, and what comes
        held = came if self.gathers or self.ranks == 2 else 3 * pairs
        single = query.numel() * torch.float32.itemsize
        sums = query.numel() // query.shape[-1] * torch.float32.itemsize
        # Merging: the output so far and that of a round in float32, their difference and its product by a weight. In 16
        # bits, the round's own output too, as large as the result; otherwise it is one of the four.
        merging = 4 * single - (query.nbytes if query.itemsize == torch.float32.itemsize else 0) + 2 * sums
        return max(first, held + merging)

    def _backward(self, query: Tensor, key: Tensor, value: Tensor, flash: int) -> int:
        pairs, copies = key.nbytes + value.nbytes, _copies(key, value)
        wide = torch.float32.itemsize / query.itemsize
        queries, sums = query.nbytes, query.numel() // query.shape[-1] * torch.float32.itemsize
        dq, dkv = int(wide * queries), int(wide * pairs)  # in float32
        came = pairs * (self.ranks if self.gathers else 1)
        first = dq + copies + pairs + came + queries + pairs
        held = pairs + came if self.gathers or self.ranks == 2 else 3 * pairs
        later = dq + 3 * dkv + held  # the gradients so far, what is sent, and what comes
        moments = [
            first + max(dkv + flash, 3 * dkv),
            # The results of two rounds, the later one with half of the keys, or of the queries.
            later + max(2 * queries + 3 * pairs // 2, 3 * queries // 2 + 2 * pairs + sums // 2) + flash,
            later + dkv + queries + pairs // 2,  # sums of the keys' gradients are copied, and sent
            later + dq + queries // 2 + pairs + sums // 2,  # the sum of the queries' gradients is copied
        ]
        if self.ranks > 2:  # what is sent is made while what was sent before is there
            again = came + 2 * pairs if self.gathers else 3 * pairs
            moments.append(dq + 3 * dkv + copies + again + queries + pairs)
        return max(moments) - queries - pairs


def _copies(*tensors: Tensor) -> int:
    """Return the bytes of copies whose rows lie one after the other."""
    return sum(one.nbytes for one in tensors if not one.is_contiguous())


_ring: ContextVar[Ring | None] = ContextVar("ring", default=None)  # of the step that is simulated


def current_ring() -> Ring | None:
    return _ring.get()


def merged(func: Any, output: Any) -> Any:
    """Return the result of an operator as a ring merges it: heads outside of positions, which models copy then."""
    if _ring.get() is None or getattr(func, "_opname", "") not in _FORWARD:
        return output
    return (output[0].contiguous(), *output[1:])


@contextmanager
def in_ring(shards: Shards | None) -> Iterator[None]:
    """Simulate steps inside of the block on a part of each sequence."""
    if shards is None or shards.context == 1:
        yield
        return
    ring = Ring(shards.context, shards.rotate == GATHER)
    token = _ring.set(ring)
    try:
        yield
    finally:
        _ring.reset(token)
    if not ring.is_used:
        raise ValueError(
            f"context={shards.context} divides the sequence of a model whose attention is "
            "scaled_dot_product_attention without a mask or dropout, got a model that never calls it so. Leave the "
            'mask out of the batch, set the dropout to 0, and load models of transformers with "sdpa".'
        )
