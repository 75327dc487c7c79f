"""Bytes and FLOPs of the operations of a block, from shapes alone, for ``benchmarks/roofline.py``.

Bytes are those that every kernel must read and write, each once. FLOPs are those that the operators declare to PyTorch
(``register_flop_formula``), products of matrices counting two for a multiplication and an addition. Kernels multiply
tiles by the 64 x 64 rotation to float32's precision, which matrix units do at a fraction of their speed: ``precise``.
"""

from __future__ import annotations

from dataclasses import dataclass

SIZE = 2  # bytes of an element of bfloat16
GROUP = 64
TILE = 16  # rows whose share of dγ and dβ a program of norm_backward writes, and a sum reads
_ROTATION = 2 * GROUP


@dataclass(frozen=True)
class Work:
    """What one operation moves and computes in one pass.

    Attributes:
        operator: Its name.
        is_forward: Whether it belongs to the forward pass.
        bytes: Read and written.
        flops: At the speed of half types.
        precise: FLOPs to float32's precision.
        stored: Bytes it leaves for the backward pass.
    """

    operator: str
    is_forward: bool
    bytes: float
    flops: float = 0.0
    precise: float = 0.0
    stored: int = 0


def packed(rows: int, columns: int, bits: int) -> int:
    """Return bytes of codes, scales and offsets, as :func:`rmm_linear.packing.packed_bytes` does."""
    return rows * (-(-columns * bits // 8) + 4 * -(-columns // GROUP))


def _padded(*parts: int) -> int:
    """Bytes of parts in one tensor, as :func:`rmm_linear.packing.stored.stored_bytes` adds them."""
    return sum(-(-part // 16) * 16 for part in parts)


def product(n: int, inner: int, outer: int, *, is_forward: bool) -> Work:
    """A product of n × inner and inner × outer elements."""
    moved = SIZE * (n * inner + inner * outer + n * outer)
    return Work("products of linear layers", is_forward, moved, 2.0 * n * inner * outer)


def sketch(n: int, columns: int, rows: int, bits: int | None, *, is_forward: bool, is_stored: bool) -> Work:
    """CountSketch of n rows to ``rows``, packed as it is made where bits are given."""
    kept = SIZE * rows * columns if bits is None else packed(rows, columns, bits)
    rotation = 0 if bits is None else _ROTATION * rows * columns
    moved = SIZE * n * columns + kept
    return Work("sketch", is_forward, moved, n * columns, rotation, kept + 8 if is_stored else 0)


def pack(n: int, columns: int, bits: int, *, is_forward: bool = True) -> Work:
    """Packing of a matrix."""
    return Work(
        f"pack, {bits} bits", is_forward, SIZE * n * columns + packed(n, columns, bits), 0, _ROTATION * n * columns
    )


def unpack(n: int, columns: int, bits: int) -> Work:
    """Unpacking of a matrix, its groups left rotated."""
    return Work(f"unpack, {bits} bits", False, SIZE * n * columns + packed(n, columns, bits), 2 * n * columns)


def unrotate(n: int, columns: int) -> Work:
    """Undoing the rotation of a matrix."""
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
    return [
        *made,
        Work("derivative, apply", False, 2 * SIZE * elements + codes, elements),
    ]


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
    return [
        *made,
        Work("gated, apply", False, 3 * SIZE * elements + codes, 0, rotations),
    ]


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
    """A residual addition, and that of the two gradients."""
    return [Work("residual", is_forward, 3 * SIZE * n * columns) for is_forward in (True, False)]


def rotary(n: int, columns: int) -> list[Work]:
    """Rotary positions of queries and keys, in one kernel."""
    return [Work("rotary positions", is_forward, 2 * 2 * SIZE * n * columns) for is_forward in (True, False)]
