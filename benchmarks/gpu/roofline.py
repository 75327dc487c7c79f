"""The least time that a block can take, from its bytes and FLOPs: not a measurement.

An operation takes at least max(bytes / bandwidth, FLOPs / peak). Bytes and FLOPs follow from the shapes, see
the functions below; bandwidths and peaks are those of published data sheets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SIZE = 2  # bytes of an element of bfloat16
GROUP = 64
TILE = 16  # rows whose share of dγ and dβ a program of norm_backward writes, and a sum reads
_ROTATION = 2 * GROUP


@dataclass(frozen=True)
class Work:
    """What one operation moves and computes in one pass."""

    operator: str  # its name
    is_forward: bool  # whether it belongs to the forward pass
    bytes: float  # read and written
    flops: float = 0.0  # at the speed of half types
    precise: float = 0.0  # FLOPs to float32's precision
    stored: int = 0  # bytes it leaves for the backward pass


def packed(rows: int, columns: int, bits: int) -> int:
    """Return bytes of codes, scales and offsets, as :func:`rmm_linear.packing.packed_bytes` does."""
    return rows * (-(-columns * bits // 8) + 4 * -(-columns // GROUP))


def _padded(*parts: int) -> int:
    """Bytes of parts in one tensor, as :func:`rmm_linear.packing.stored.stored_bytes` adds them."""
    return sum(-(-part // 16) * 16 for part in parts)


def product(n: int, inner: int, outer: int, *, is_forward: bool) -> Work:
    moved = SIZE * (n * inner + inner * outer + n * outer)
    return Work("products of linear layers", is_forward, moved, 2.0 * n * inner * outer)


def sketch(n: int, columns: int, rows: int, bits: int | None, *, is_forward: bool, is_stored: bool) -> Work:
    """CountSketch of n rows to ``rows``, packed as it is made where bits are given."""
    kept = SIZE * rows * columns if bits is None else packed(rows, columns, bits)
    rotation = 0 if bits is None else _ROTATION * rows * columns
    moved = SIZE * n * columns + kept
    return Work("sketch", is_forward, moved, n * columns, rotation, kept + 8 if is_stored else 0)


def pack(n: int, columns: int, bits: int, *, is_forward: bool = True) -> Work:
    return Work(
        f"pack, {bits} bits", is_forward, SIZE * n * columns + packed(n, columns, bits), 0, _ROTATION * n * columns
    )


def unpack(n: int, columns: int, bits: int) -> Work:
    return Work(f"unpack, {bits} bits", False, SIZE * n * columns + packed(n, columns, bits), 2 * n * columns)


def unrotate(n: int, columns: int) -> Work:
    return Work("unrotate", False, 2 * SIZE * n * columns, 0, _ROTATION * n * columns)


def norm(n: int, columns: int, bits: int | None, *, is_fused: bool = False) -> list[Work]:
    """LayerNorm or RMSNorm in one kernel each way, or with a packed copy, which the output's kernel may make."""
    elements = n * columns
    forward = Work("norm", True, 2 * SIZE * elements, 8 * elements, stored=0 if bits else SIZE * elements)
    if bits is None:
        return [forward, Work("norm", False, 3 * SIZE * elements, 16 * elements)]
    codes, rstd, sums = packed(n, columns, bits), 4 * n, 8 * elements // TILE
    stored = _padded(8, rstd, -(-columns * bits // 8) * n, 4 * n * -(-columns // GROUP))
    made = [
        forward,
        Work("norm copy", True, SIZE * elements + codes + rstd, 8 * elements, _ROTATION * elements, stored),
    ]
    if is_fused:
        moved = 2 * SIZE * elements + codes + rstd
        made = [Work("norm with copy", True, moved, 10 * elements, _ROTATION * elements, stored)]
    return [
        *made,
        Work(
            "norm gradients", False, 2 * SIZE * elements + codes + rstd + 2 * sums, 16 * elements, _ROTATION * elements
        ),
    ]


def activation(n: int, columns: int, bits: int | None, *, is_fused: bool = False) -> list[Work]:
    """GELU, or with its derivative in few bits, which the output's kernel may make."""
    elements = n * columns
    forward = Work("activation", True, 2 * SIZE * elements, stored=0 if bits else SIZE * elements)
    if bits is None:
        return [forward, Work("activation", False, 3 * SIZE * elements)]
    codes = n * -(-columns * bits // 8)
    made = [forward, Work("derivative, pack", True, SIZE * elements + codes, elements, stored=_padded(8, codes))]
    if is_fused:
        moved = 2 * SIZE * elements + codes
        made = [Work("activation with derivative", True, moved, 2 * elements, stored=_padded(8, codes))]
    return [*made, Work("derivative, apply", False, 2 * SIZE * elements + codes, elements)]


def gated(n: int, columns: int, bits: int | None, *, is_fused: bool = False) -> list[Work]:
    """silu(a) · b as PyTorch's kernels make it, or with both products packed, which the output's kernel may do."""
    elements = n * columns
    forward = Work("gated activation", True, 5 * SIZE * elements, stored=0 if bits else 3 * SIZE * elements)
    if bits is None:  # a, b and silu(a) are saved; y · b, y · silu(a), and the derivative
        return [forward, Work("gated activation", False, 9 * SIZE * elements)]
    codes = 2 * packed(n, columns, bits)
    pair = [-(-columns * bits // 8) * n, 4 * n * -(-columns // GROUP)] * 2
    rotations = 2 * _ROTATION * elements
    made = [forward, Work("gated, pack", True, 2 * SIZE * elements + codes, 0, rotations, _padded(16, *pair))]
    if is_fused:
        moved = 3 * SIZE * elements + codes
        made = [Work("gated with products", True, moved, 2 * elements, rotations, _padded(16, *pair))]
    return [*made, Work("gated, apply", False, 3 * SIZE * elements + codes, 0, rotations)]


def dropout(n: int, columns: int, *, is_packed: bool) -> list[Work]:
    """Dropout with a mask of one byte per element, or of one bit."""
    elements = n * columns
    forward = Work("dropout", True, (2 * SIZE + 1) * elements, stored=0 if is_packed else elements)
    if not is_packed:
        return [forward, Work("dropout", False, (2 * SIZE + 1) * elements)]
    bits = n * -(-columns // 8)
    return [
        forward,
        Work("mask, pack", True, elements + bits, elements, stored=bits),
        Work("mask, apply", False, 2 * SIZE * elements + bits, elements),
    ]


def attention(n: int, length: int, width: int, bits: int | None, *, is_causal: bool) -> list[Work]:
    """Attention by fused kernels, which keep scores on the chip; half of the scores where it is causal."""
    elements, scores = n * width, n * length * width / (2 if is_causal else 1)
    forward = Work("attention", True, 4 * SIZE * elements, 4 * scores, stored=0 if bits else 4 * SIZE * elements)
    backward = Work("attention", False, 8 * SIZE * elements, 10 * scores)
    if bits is None:
        return [forward, backward]
    codes = packed(n, width, bits)
    pair = [-(-width * bits // 8) * n, 4 * n * -(-width // GROUP)]
    stored = _padded(24, *pair * 3)
    rotations = 3 * _ROTATION * elements
    return [  # the backward pass runs the forward pass again: see rmm_linear/ops/fused_attention.py
        forward,
        Work("attention, pack", True, 3 * (SIZE * elements + codes), 0, rotations, stored),
        Work("attention, unpack", False, 3 * (3 * SIZE * elements + codes), 0, rotations),  # and unrotate
        Work("attention, forward again", False, 4 * SIZE * elements, 4 * scores),
        backward,
    ]


def addition(n: int, columns: int) -> list[Work]:
    return [Work("residual", is_forward, 3 * SIZE * n * columns) for is_forward in (True, False)]


def rotary(n: int, columns: int) -> list[Work]:
    """Rotary positions of queries and keys, in one kernel."""
    return [Work("rotary positions", is_forward, 2 * 2 * SIZE * n * columns) for is_forward in (True, False)]


RATIO = 0.1  # K/N of 16-bit sketches, and bytes kept of packed ones


@dataclass(frozen=True)
class Machine:
    name: str  # its name
    bandwidth: float  # bytes per second of its memory
    flops: float  # dense FLOPs per second in bfloat16
    # FLOPs per second of products to float32's precision: a third of tf32's peak, as three products make one, or on AMD
    # the matrix unit's peak in float32
    precise: float

    def seconds(self, one: Work) -> float:
        return max(one.bytes / self.bandwidth, one.flops / self.flops + one.precise / self.precise)


MACHINES = (
    Machine("A100 80 GB SXM", 2.04e12, 312e12, 156e12 / 3), Machine("H100 SXM", 3.35e12, 989e12, 494.5e12 / 3),
    Machine("H200 SXM", 4.8e12, 989e12, 494.5e12 / 3), Machine("MI300X", 5.3e12, 1307e12, 163.4e12),
)  # fmt: skip


@dataclass(frozen=True)
class Block:
    name: str  # title
    batch: int  # sequences
    length: int  # tokens of each
    width: int  # H
    inner: int  # width of the MLP
    # whether the MLP is LLaMA's, attention causal with rotary positions, and norms before what they feed; else
    # RoBERTa's, with GELU and two dropouts
    is_gated: bool

    @property
    def tokens(self) -> int:
        return self.batch * self.length


BLOCKS = (
    Block("RoBERTa-base, 32 x 512", 32, 512, 768, 3072, is_gated=False),
    Block("LLaMA-7B, 4 x 4096", 4, 4096, 4096, 11008, is_gated=True),
)


@dataclass(frozen=True)
class Way:
    name: str  # title
    is_sketched: bool = False  # the linear layers' inputs
    bits: int | None = None  # of the sketches; None is the dtype
    is_packed: bool = False  # all other operations
    is_fused: bool = False  # outputs of norms and activations in the pass that packs their stand-ins
    is_checkpointed: bool = False  # none, but the block's forward pass runs once more


EXACT = Way("exact")
ALL = Way("all operations", is_sketched=True, is_packed=True)
FUSED = Way("all operations, fused", is_sketched=True, is_packed=True, is_fused=True)
WAYS = (
    EXACT, Way("linears sketched", is_sketched=True), ALL, FUSED, Way("all operations, linears in 4 bits",
    is_sketched=True, bits=4, is_packed=True), Way("checkpointing", is_checkpointed=True),
)  # fmt: skip


def rows_kept(tokens: int, bits: int | None) -> int:
    """Return K: a tenth of the rows, or as many as packed take a tenth of the bytes."""
    per_element = SIZE if bits is None else bits / 8 + 4 / GROUP
    return max(1, round(RATIO * tokens * SIZE / per_element))


def works(block: Block, way: Way) -> list[Work]:
    n, h, c = block.tokens, block.width, block.inner
    inputs = [(h, [h, h, h]), (h, [h]), (h, [c, c] if block.is_gated else [c]), (c, [h])]
    found: list[Work] = []
    for place, (inner, outers) in enumerate(inputs):
        stored = SIZE * n * inner if place != 1 else 0  # attention saves its output itself
        found += linears(n, inner, outers, way, stored=stored)
    found += 2 * norm(n, h, 2 if way.is_packed else None, is_fused=way.is_fused)
    found += attention(n, block.length, h, 4 if way.is_packed else None, is_causal=block.is_gated)
    pointwise = gated if block.is_gated else activation
    found += pointwise(n, c, 4 if way.is_packed else None, is_fused=way.is_fused)
    found += 2 * addition(n, h)
    found += rotary(n, h) if block.is_gated else 2 * dropout(n, h, is_packed=way.is_packed)
    if way.is_checkpointed:
        found += [one for one in found if one.is_forward]
    return found


def linears(n: int, inner: int, outers: Sequence[int], way: Way, *, stored: int) -> list[Work]:
    """Linear layers that read the same input: one stand-in serves all of them."""
    rows = rows_kept(n, way.bits) if way.is_sketched else n
    found = [product(n, inner, outer, is_forward=True) for outer in outers]
    if way.is_sketched:
        found.append(sketch(n, inner, rows, way.bits, is_forward=True, is_stored=True))
    else:
        found.append(Work("products of linear layers", True, 0, stored=stored))
    for outer in outers:
        found.append(product(n, outer, inner, is_forward=False))  # dX
        if way.is_sketched:
            found.append(sketch(n, outer, rows, None, is_forward=False, is_stored=False))  # SᵀY
        if way.bits is not None:
            found += [unpack(rows, inner, way.bits), unrotate(outer, inner)]
        found.append(product(outer, rows, inner, is_forward=False))  # dW
    return found


def saved(block: Block, way: Way) -> int:
    """Return the bytes saved for the backward pass; of a checkpointed block that is its input."""
    return SIZE * block.tokens * block.width if way.is_checkpointed else sum(o.stored for o in works(block, way))
