"""The least time that a block can take, from its bytes and FLOPs: not a measurement.

An operation takes at least max(bytes / bandwidth, FLOPs / peak). Bytes and FLOPs follow from the shapes, see
the functions below; bandwidths and peaks are those of published data sheets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rmm_linear.packing import GROUP, packed_bytes, packed_parts

SIZE = 2  # bytes of an element of bfloat16
_ROTATION = 2 * GROUP  # a product in half types: the matrix is exact in them


@dataclass(frozen=True)
class Work:
    """What one operation moves and computes in one pass."""

    operator: str  # its name
    is_forward: bool  # whether it belongs to the forward pass
    bytes: float  # read and written
    flops: float = 0.0  # at the speed of half types
    stored: int = 0  # bytes it leaves for the backward pass


def _padded(*parts: int) -> int:
    """Bytes of parts in one tensor, as :func:`rmm_linear.packing.stored.stored_bytes` adds them."""
    return sum(-(-part // 16) * 16 for part in parts)


def _parts(n: int, columns: int, bits: int) -> list[int]:
    """Bytes of the codes, and of scales."""
    return [math.prod(shape) for shape, _ in packed_parts(n, columns, bits)]


def _exact(
    name: str, elements: int, moved: tuple[int, int], saved: int, flops: tuple[float, float] = (0, 0)
) -> list[Work]:
    """Both passes of PyTorch's own kernels, which move and save so many times all elements."""
    forward = Work(name, True, SIZE * moved[0] * elements, flops[0], stored=SIZE * saved * elements)
    return [forward, Work(name, False, SIZE * moved[1] * elements, flops[1])]


def product(n: int, inner: int, outer: int, *, is_forward: bool) -> Work:
    moved = SIZE * (n * inner + inner * outer + n * outer)
    return Work("products of linear layers", is_forward, moved, 2.0 * n * inner * outer)


def sketch(n: int, columns: int, rows: int, *, is_forward: bool, is_stored: bool) -> Work:
    """CountSketch of n rows to ``rows``."""
    kept = SIZE * rows * columns
    return Work("sketch", is_forward, SIZE * n * columns + kept, n * columns, kept + 8 if is_stored else 0)


def pack(n: int, columns: int, bits: int) -> Work:
    kept = packed_bytes(n, columns, bits)
    return Work(f"pack, {bits} bits", True, SIZE * n * columns + kept, _ROTATION * n * columns, kept + 8)


def unpack(n: int, columns: int, bits: int) -> Work:
    """Decode, with the rotation undone."""
    moved = SIZE * n * columns + packed_bytes(n, columns, bits)
    return Work(f"unpack, {bits} bits", False, moved, _ROTATION * n * columns)


def norm(n: int, columns: int, bits: int | None, *, is_fused: bool = False) -> list[Work]:
    """LayerNorm or RMSNorm in one kernel each way, or with a packed copy, which the output's kernel may make.

    Its passes over rows are kernels of their own: statistics before it is packed, sums before the gradients.
    """
    elements = n * columns
    exact = _exact("norm", elements, (2, 3), 1, (8 * elements, 16 * elements))
    if bits is None:
        return exact
    read, stored = SIZE * elements, _padded(8, 4 * n, *_parts(n, columns, bits))
    packed, statistics = read + packed_bytes(n, columns, bits) + 8 * n, read + 8 * n
    copy = Work("norm copy", True, statistics + packed, (_ROTATION + 8) * elements, stored)
    fused = Work("norm with copy", True, statistics + packed + read, (_ROTATION + 10) * elements, stored)
    sums = 2 * 8 * elements // GROUP  # of rows, in every group, written and read
    gradients = Work("norm gradients", False, 2 * packed + read + sums, (_ROTATION + 16) * elements)
    return [fused, gradients] if is_fused else [replace(exact[0], stored=0), copy, gradients]


def activation(n: int, columns: int, bits: int | None, *, is_fused: bool = False) -> list[Work]:
    """GELU, or with its derivative in few bits, which the output's kernel may make."""
    elements = n * columns
    exact = _exact("activation", elements, (2, 3), 1)
    if bits is None:
        return exact
    codes = n * -(-columns * bits // 8)
    moved, stored = 2 * SIZE * elements + codes, _padded(8, codes)
    pack = Work("derivative, pack", True, moved - SIZE * elements, elements, stored=stored)
    fused = Work("activation with derivative", True, moved, 2 * elements, stored=stored)
    apply = Work("derivative, apply", False, moved, elements)
    return [fused, apply] if is_fused else [replace(exact[0], stored=0), pack, apply]


def gated(n: int, columns: int, bits: int | None, *, is_fused: bool = False) -> list[Work]:
    """silu(a) · b as PyTorch's kernels make it, or with both products packed, which the output's kernel may do."""
    elements = n * columns
    exact = _exact("gated activation", elements, (5, 9), 3)  # a, b and silu(a) are saved
    if bits is None:
        return exact
    moved, rotations = 3 * SIZE * elements + 2 * packed_bytes(n, columns, bits), 2 * _ROTATION * elements
    stored = _padded(16, *_parts(n, columns, bits) * 2)
    pack = Work("gated, pack", True, moved - SIZE * elements, rotations, stored)
    fused = Work("gated with products", True, moved, 2 * elements + rotations, stored)
    apply = Work("gated, apply", False, moved, rotations)
    return [fused, apply] if is_fused else [replace(exact[0], stored=0), pack, apply]


def dropout(n: int, columns: int, *, is_packed: bool, is_fused: bool = False) -> list[Work]:
    """Dropout with a mask of one byte per element, of one bit, or of none where a kernel draws it again."""
    elements = n * columns
    if is_fused:
        name, moved = "dropout without a mask", 2 * SIZE * elements
        return [Work(name, True, moved, elements, stored=8), Work(name, False, moved, elements)]
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
    exact = _exact("attention", elements, (4, 8), 4, (4 * scores, 10 * scores))
    if bits is None:
        return exact
    codes, rotations = packed_bytes(n, width, bits), 3 * _ROTATION * elements
    stored = _padded(24, *_parts(n, width, bits) * 3)
    return [  # the backward pass runs the forward pass again: see rmm_linear/ops/fused_attention.py
        replace(exact[0], stored=0),
        Work("attention, pack", True, 3 * (SIZE * elements + codes), rotations, stored),
        Work("attention, unpack", False, 3 * (SIZE * elements + codes), rotations),
        Work("attention, forward again", False, 4 * SIZE * elements, 4 * scores),
        exact[1],
    ]


def addition(n: int, columns: int) -> list[Work]:
    return [Work("residual", is_forward, 3 * SIZE * n * columns) for is_forward in (True, False)]


def rotary(n: int, columns: int) -> list[Work]:
    """Rotary positions of queries and keys, in one kernel."""
    return [Work("rotary positions", is_forward, 2 * 2 * SIZE * n * columns) for is_forward in (True, False)]


def head(n: int, width: int, classes: int, rows: int | None, *, adds_wide: bool = True) -> list[Work]:
    """Output layer and loss of a language model: as transformers computes them, or in chunks of ``rows`` rows.

    adds_wide: Whether the weight's products are added in float32 as they are made, or by a pass of its own.
    """
    wide, logits, weight = 4, n * classes, width * classes
    if rows is None:
        return [
            replace(product(n, width, classes, is_forward=True), stored=SIZE * n * width),
            # To float32, log-softmax; its gradient, which reads one of zeros but for the class, to the half type.
            Work("loss", True, (SIZE + 3 * wide) * logits, stored=wide * logits),
            Work("loss", False, (5 * wide + SIZE) * logits),
            product(n, classes, width, is_forward=False),
            product(width, n, classes, is_forward=False),
        ]
    of_weight, added = product(width, rows, classes, is_forward=True), 2 * wide * weight
    chunk = [
        product(rows, width, classes, is_forward=True),
        # To float32, maximum, difference, exponential, sum, quotient, to the half type.
        Work("loss", True, (2 * SIZE + 10 * wide) * rows * classes),
        product(rows, classes, width, is_forward=True),
        replace(of_weight, bytes=of_weight.bytes + added - SIZE * weight) if adds_wide else of_weight,
        *([] if adds_wide else [Work("loss", True, SIZE * weight + added)]),
    ]
    scaled = Work("loss", False, (3 * wide + SIZE) * weight + 4 * SIZE * n * width)  # by the loss's own gradient
    return [*chunk * math.ceil(n / rows), scaled]


RATIO = 0.1  # K/N of sketches


@dataclass(frozen=True)
class Machine:
    name: str  # its name
    bandwidth: float  # bytes per second of its memory
    flops: float  # dense FLOPs per second in bfloat16

    def seconds(self, one: Work) -> float:
        return max(one.bytes / self.bandwidth, one.flops / self.flops)


MACHINES = (
    Machine("A100 80 GB SXM", 2.04e12, 312e12), Machine("H100 SXM", 3.35e12, 989e12),
    Machine("H200 SXM", 4.8e12, 989e12), Machine("MI300X", 5.3e12, 1307e12),
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

HEAD = (16384, 2048, 128_256)  # tokens, H and V of LLaMA-1B


@dataclass(frozen=True)
class Way:
    name: str  # title
    is_sketched: bool = False  # the linear layers' inputs
    bits: int | None = None  # of all rows of the linear layers' inputs
    is_packed: bool = False  # all other operations
    is_fused: bool = False  # outputs of norms, activations and dropout in the pass that packs their stand-ins
    is_checkpointed: bool = False  # none, but the block's forward pass runs once more


EXACT = Way("exact")
ALL = Way("sketches, all operations", is_sketched=True, is_packed=True)
FUSED = Way("sketches, all operations, fused", is_sketched=True, is_packed=True, is_fused=True)
WAYS = (
    EXACT, Way("default: all operations, rows in 3 bits", bits=3, is_packed=True),
    Way("default, fused", bits=3, is_packed=True, is_fused=True), Way("linears sketched", is_sketched=True), ALL, FUSED,
    Way("checkpointing", is_checkpointed=True),
)  # fmt: skip


def works(block: Block, way: Way) -> list[Work]:
    n, h, c = block.tokens, block.width, block.inner
    inputs = [(h, [h, h, h]), (h, [h]), (h, [c, c] if block.is_gated else [c]), (c, [h])]
    found: list[Work] = []
    for place, (inner, outers) in enumerate(inputs):
        stored = SIZE * n * inner if place != 1 else 0  # attention saves its output itself
        found += linears(n, inner, outers, way, stored=stored)
    found += 2 * norm(n, h, 3 if way.is_packed else None, is_fused=way.is_fused)
    found += attention(n, block.length, h, 4 if way.is_packed else None, is_causal=block.is_gated)
    pointwise = gated if block.is_gated else activation
    found += pointwise(n, c, 4 if way.is_packed else None, is_fused=way.is_fused)
    found += 2 * addition(n, h)
    found += rotary(n, h) if block.is_gated else 2 * dropout(n, h, is_packed=way.is_packed, is_fused=way.is_fused)
    if way.is_checkpointed:
        found += [one for one in found if one.is_forward]
    return found


def linears(n: int, inner: int, outers: Sequence[int], way: Way, *, stored: int) -> list[Work]:
    """Linear layers that read the same input: one stand-in serves all of them."""
    rows = max(1, round(RATIO * n)) if way.is_sketched else n
    found = [product(n, inner, outer, is_forward=True) for outer in outers]
    if way.is_sketched:
        found.append(sketch(n, inner, rows, is_forward=True, is_stored=True))
    elif way.bits is not None:
        found.append(pack(n, inner, way.bits))
    else:
        found.append(Work("products of linear layers", True, 0, stored=stored))
    for outer in outers:
        found.append(product(n, outer, inner, is_forward=False))  # dX
        if way.is_sketched:
            found.append(sketch(n, outer, rows, is_forward=False, is_stored=False))  # SᵀY
        if way.bits is not None:
            found.append(unpack(n, inner, way.bits))
        found.append(product(outer, rows, inner, is_forward=False))  # dW
    return found


def saved(block: Block, way: Way) -> int:
    """Return the bytes saved for the backward pass; of a checkpointed block that is its input."""
    return SIZE * block.tokens * block.width if way.is_checkpointed else sum(o.stored for o in works(block, way))
