"""``python -m benchmarks roofline``: the least time that a block can take, from its bytes and FLOPs. Not a measurement.

An operation takes at least max(bytes / bandwidth, FLOPs / peak). Bytes and FLOPs follow from the shapes, see
``benchmarks/work.py``; bandwidths and peaks are those of published data sheets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import work
from benchmarks.work import Work

RATIO = 0.1  # K/N of 16-bit sketches, and bytes kept of packed ones


@dataclass(frozen=True)
class Machine:
    """An accelerator's data sheet.

    Attributes:
        name: Its name.
        bandwidth: Bytes per second of its memory.
        flops: Dense FLOPs per second in bfloat16.
        precise: FLOPs per second of products to float32's precision: a third of tf32's peak, as three products make
            one, or on AMD the matrix unit's peak in float32.
    """

    name: str
    bandwidth: float
    flops: float
    precise: float

    def seconds(self, one: Work) -> float:
        """Return the least time of an operation."""
        return max(one.bytes / self.bandwidth, one.flops / self.flops + one.precise / self.precise)


MACHINES = (
    Machine("A100 80 GB SXM", 2.04e12, 312e12, 156e12 / 3),
    Machine("H100 SXM", 3.35e12, 989e12, 494.5e12 / 3),
    Machine("H200 SXM", 4.8e12, 989e12, 494.5e12 / 3),
    Machine("MI300X", 5.3e12, 1307e12, 163.4e12),
)


@dataclass(frozen=True)
class Block:
    """The shape of a transformer block in bfloat16.

    Attributes:
        name: Title.
        batch: Sequences.
        length: Tokens of each.
        width: H.
        inner: Width of the MLP.
        is_gated: Whether the MLP is LLaMA's, attention causal with rotary positions, and norms before what they feed;
            else RoBERTa's, with GELU and two dropouts.
    """

    name: str
    batch: int
    length: int
    width: int
    inner: int
    is_gated: bool

    @property
    def tokens(self) -> int:
        """N."""
        return self.batch * self.length


BLOCKS = (
    Block("RoBERTa-base, 32 x 512", 32, 512, 768, 3072, is_gated=False),
    Block("LLaMA-7B, 4 x 4096", 4, 4096, 4096, 11008, is_gated=True),
)


@dataclass(frozen=True)
class Way:
    """What of a block has stand-ins.

    Attributes:
        name: Title.
        is_sketched: The linear layers' inputs.
        bits: Of the sketches; None is the dtype.
        is_packed: All other operations.
        is_fused: Outputs of norms and activations in the pass that packs their stand-ins.
        is_checkpointed: None, but the block's forward pass runs once more.
    """

    name: str
    is_sketched: bool = False
    bits: int | None = None
    is_packed: bool = False
    is_fused: bool = False
    is_checkpointed: bool = False


EXACT = Way("exact")
ALL = Way("all operations", is_sketched=True, is_packed=True)
FUSED = Way("all operations, fused", is_sketched=True, is_packed=True, is_fused=True)
WAYS = (
    EXACT,
    Way("linears sketched", is_sketched=True),
    ALL,
    FUSED,
    Way("all operations, linears in 4 bits", is_sketched=True, bits=4, is_packed=True),
    Way("checkpointing", is_checkpointed=True),
)


def rows_kept(tokens: int, bits: int | None) -> int:
    """Return K: a tenth of the rows, or as many as packed take a tenth of the bytes."""
    per_element = work.SIZE if bits is None else bits / 8 + 4 / work.GROUP
    return max(1, round(RATIO * tokens * work.SIZE / per_element))


def works(block: Block, way: Way) -> list[Work]:
    """List the operations of a block's forward and backward pass."""
    n, h, c = block.tokens, block.width, block.inner
    inputs = [(h, [h, h, h]), (h, [h]), (h, [c, c] if block.is_gated else [c]), (c, [h])]
    found: list[Work] = []
    for place, (inner, outers) in enumerate(inputs):
        stored = work.SIZE * n * inner if place != 1 else 0  # attention saves its output itself
        found += linears(n, inner, outers, way, stored=stored)
    found += 2 * work.norm(n, h, 2 if way.is_packed else None, is_fused=way.is_fused)
    found += work.attention(n, block.length, h, 4 if way.is_packed else None, is_causal=block.is_gated)
    pointwise = work.gated if block.is_gated else work.activation
    found += pointwise(n, c, 4 if way.is_packed else None, is_fused=way.is_fused)
    found += 2 * work.addition(n, h)
    found += work.rotary(n, h) if block.is_gated else 2 * work.dropout(n, h, is_packed=way.is_packed)
    if way.is_checkpointed:
        found += [one for one in found if one.is_forward]
    return found


def linears(n: int, inner: int, outers: Sequence[int], way: Way, *, stored: int) -> list[Work]:
    """Linear layers that read the same input: one stand-in serves all of them."""
    rows = rows_kept(n, way.bits) if way.is_sketched else n
    found = [work.product(n, inner, outer, is_forward=True) for outer in outers]
    if way.is_sketched:
        found.append(work.sketch(n, inner, rows, way.bits, is_forward=True, is_stored=True))
    else:
        found.append(Work("products of linear layers", True, 0, stored=stored))
    for outer in outers:
        found.append(work.product(n, outer, inner, is_forward=False))  # dX
        if way.is_sketched:
            found.append(work.sketch(n, outer, rows, None, is_forward=False, is_stored=False))  # SᵀY
        if way.bits is not None:
            found += [work.unpack(rows, inner, way.bits), work.unrotate(outer, inner)]
        found.append(work.product(outer, rows, inner, is_forward=False))  # dW
    return found


def saved(block: Block, way: Way) -> int:
    """Return the bytes saved for the backward pass; of a checkpointed block that is its input."""
    return work.SIZE * block.tokens * block.width if way.is_checkpointed else sum(o.stored for o in works(block, way))
