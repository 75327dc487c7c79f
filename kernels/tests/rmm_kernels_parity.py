"""All comparisons of the kernels with plain PyTorch: for test_parity.py, and for ``python -m benchmarks gpu``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import rmm_kernels_channels as channels
import rmm_kernels_comparisons as compare
import rmm_kernels_derivatives as derivatives
import rmm_kernels_fused as fused
import rmm_kernels_packed as packed
import torch
from rmm_kernels_checks import DTYPES, MASKS, SHAPES, VIEWS, Check

from rmm_linear import packing
from rmm_linear.packing.gated import ACTIVATIONS
from rmm_linear.sketches import SAMPLERS

Comparison = Callable[[str], list[Check]]


def comparisons() -> dict[str, Comparison]:
    """Return the comparisons on small odd shapes."""
    found: dict[str, Comparison] = {}

    def add(function: Callable[..., list[Check]], *arguments: Any) -> None:
        words = (str(a).removeprefix("torch.").replace(", ", "x").strip("()") for a in arguments)
        found[" ".join((function.__name__, *words))] = lambda device: function(device, *arguments)

    half = DTYPES[1:]
    for mask in MASKS:
        for shape in SHAPES:
            add(compare.countsketch, shape, mask, torch.float32)
        for dtype in half:
            add(compare.countsketch, SHAPES[0], mask, dtype)
        add(compare.whole_numbers, mask)
    for shape in SHAPES[:2]:
        for mask in ("all", "some", "few"):
            add(compare.gathered, shape, mask)
    blocks = [("gaussian", 16), ("rademacher", 9), ("hadamard", 9)]
    for kind, block in [(kind, None) for kind, _ in blocks] + blocks:
        for mask in MASKS:
            add(compare.dense_sketch, kind, block, mask)
        for dtype in half:
            add(compare.dense_sketch, kind, block, "some", dtype)
    for kind, rows in (("gaussian", 37), ("rademacher", 65), ("hadamard", 65)):  # more rows than a tile
        add(compare.dense_sketch, kind, None, "all", torch.float32, (130, rows, 5))
    for bits in packing.WIDTHS:
        for columns in (64, 130, 5, 191):
            add(compare.pack_and_unpack, bits, columns)
        add(compare.pack_and_unpack, bits, 65, torch.float32, 150)
        add(compare.short_group, bits)
        add(compare.scaled_rows, bits)
        for dtype in half:
            add(compare.pack_and_unpack, bits, 70, dtype)
        for kind in ("countsketch", "gaussian", "rademacher", "hadamard"):
            for mask in ("all", "some"):
                add(compare.packed_as_made, kind, bits, mask)
        for kind in ("gaussian", "hadamard"):
            add(compare.packed_as_made, kind, bits, "few", 16)
        for kind, mask in (("countsketch", "none"), ("rademacher", "none"), ("hadamard", "few")):
            add(compare.packed_as_made, kind, bits, mask)
    for kind in ("countsketch", "rademacher"):
        add(compare.masked_rows_unread, kind)
    for view in VIEWS:
        add(compare.strides, view)
    for shape in ((1, 1), (17, 300), (40, 256)):
        for dtype in DTYPES:
            add(compare.row_norms, shape, dtype)
    for bits in (2, 1.6, 1):
        for columns, dtype in ((128, torch.float32), (300, torch.float32), (70, torch.bfloat16), (256, torch.float16)):
            add(compare.encode_and_decode, bits, columns, dtype)
    for kind in SAMPLERS:
        for mask in MASKS:
            add(compare.sampled, kind, mask, None)
        for bits in packing.WIDTHS:
            add(compare.sampled, kind, "some", bits)
        for dtype in half:
            add(compare.sampled, kind, "some", None, dtype)
    for bits in packing.WIDTHS:
        for columns, centered, mask in ((64, True, "all"), (130, False, "some"), (5, True, "few")):
            add(packed.pack_norm, bits, columns, centered, mask)
            add(packed.norm_gradients, bits, columns, centered, mask)
    for dtype in half:
        add(packed.pack_norm, 4, 70, True, "all", dtype)
        add(packed.norm_gradients, 4, 70, False, "some", dtype)
    add(packed.pack_norm, 2, 300, True, "all", torch.float32, 17)  # statistics of more than one block of columns
    add(packed.norm_gradients, 2, 70, True, "all", torch.float32, 17, False)
    add(packed.norm_strides, 2)
    for count in (None, 0, 3, 1100, 1500):
        add(compare.random_keys, count)
    for shape in ((1, 1), (17, 300), (40, 256), (37, 13)):
        for dtype in DTYPES:
            for indexed in (False, True):
                add(packed.pack_and_apply_mask, shape, dtype, indexed)
    for view in VIEWS:
        add(packed.strided_masks, view)
    for shape in ((1, 1), (17, 300), (3, 4096), (5, 1639)):  # of tiles of 4096 elements, whole ones and parts
        for dtype in DTYPES:
            add(packed.seeded_dropout, shape, dtype)
    for bits in packing.WIDTHS:
        for activation in ACTIVATIONS:
            add(packed.gated_products, activation, bits, (37, 130), torch.float32, activation == "silu")
        for columns in (5, 64):
            add(packed.gated_products, "gelu", bits, (40, columns), torch.float32, False)
        add(packed.gated_halves, bits)
    for dtype in half:
        for indexed in (False, True):
            add(packed.gated_products, "silu", 4, (37, 130), dtype, indexed)
    for kind in ("countsketch", "rows", "gaussian", "rademacher", "hadamard", *SAMPLERS):
        for mask in ("all", "some", "few"):
            for bits in (None, 4):
                add(compare.layer, kind, bits, mask)
        for bits in (8, 3, 2):
            add(compare.layer, kind, bits, "some")
    for arguments in derivatives.cases():
        add(derivatives.derivative, *arguments)
    for function, *arguments in (*fused.cases(), *channels.cases()):
        add(function, *arguments)
    return found


def real_sizes() -> dict[str, Comparison]:
    """Return comparisons at the sizes of real layers, for devices that are fast enough."""
    shape = (16384, 1638, 4096)
    return {
        "countsketch, real size": lambda device: compare.countsketch(device, shape, "some", torch.bfloat16),
        "gathered, real size": lambda device: compare.gathered(device, shape, "some"),
        "rademacher, real size": lambda d: compare.dense_sketch(d, "rademacher", 128, "all", torch.bfloat16, shape),
        "gaussian, real size": lambda d: compare.dense_sketch(
            d, "gaussian", 512, "some", torch.bfloat16, (4096, 410, 3072)
        ),
        "derivative, real size": lambda d: derivatives.derivative(d, "gelu", 4, torch.bfloat16, 14336),
        "output and derivative, real size": lambda d: fused.activated(d, "gelu", 4, torch.bfloat16, 14336),
        "pack, real size": lambda device: compare.pack_and_unpack(device, 4, 4096, torch.bfloat16, 1638),
        "row norms, real size": lambda device: compare.row_norms(device, (16384, 4096), torch.bfloat16),
        "norm, real size": lambda device: packed.pack_norm(device, 2, 4096, True, "some", torch.bfloat16, 4096),
        "norm gradients, real size": lambda device: packed.norm_gradients(
            device, 2, 4096, True, "some", torch.bfloat16, 4096
        ),
        "channels, real size": lambda d: channels.channel_norm(d, (64, 1, 256, 3136), 0, 3, torch.bfloat16),
        "channels last, real size": lambda d: channels.channel_norm(d, (64, 784, 512, 1), 32, 3, torch.bfloat16),
        "max pooling, real size": lambda d: channels.max_pool(
            d, (64, 64, 112, 112), ((3, 3), (2, 2), (1, 1), (1, 1)), torch.bfloat16, True
        ),
        "offsets beyond 2**31": lambda device: compare.long_offsets(device, 2**19 + 5, 4104),
    }
