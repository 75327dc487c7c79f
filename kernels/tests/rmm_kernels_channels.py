"""The kernels of norms over channels and of max pooling against plain PyTorch, and their variants to compile."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from rmm_kernels_checks import Check, Inputs, close, same

from rmm_linear.backends.triton import kernels
from rmm_linear.ops import triton
from rmm_linear.packing import channel_norms, pooling

EPS = 1e-5
HALVES = (torch.float16, torch.bfloat16)


def channel_norm(
    device: str,
    shape: tuple[int, int, int, int],
    groups: int,
    bits: int,
    dtype: torch.dtype = torch.float32,
    is_affine: bool = True,
    is_given: bool = False,
) -> list[Check]:
    """Compare statistics, the packed copy, and the gradients from one."""
    make, matrix = Inputs(device), channel_norms.packed_shape(shape)
    x = (3 * make.matrix(*matrix, dtype) + 2).view(shape)
    y = make.matrix(matrix[0] + 1, matrix[1], dtype)[1:].view(shape)  # not x, whose gradient is 0
    gamma = make.matrix(1, shape[2], dtype).view(-1) if is_affine else None
    sets, how = channel_norms.sets_of(shape, groups)[0], (bits, make.seed)
    given = [make.matrix(place, sets).view(place, -1)[0] for place in (1, 2)] if is_given else [None, None]
    expected = channel_norms.pack_channels(x, *how, EPS, groups, *given)
    found = kernels().pack_channels(x, *how, EPS, groups, matrix, *given)
    options: dict[str, Any] = {"sums": is_affine, "dtype": None if is_affine else torch.float32}
    gradients = kernels().channel_gradients(y, *expected, *how, gamma, groups, matrix, **options)
    wanted = channel_norms.channel_gradients(y, expected, *how, gamma, groups, **options)
    return [
        # Statistics and rotation are sums in another order: an element on the edge of a step can fall to either side.
        same("codes", found[0], expected.codes, limit=0.005),
        same("scales", found[1], expected.scales, limit=0.02),
        close("rstd", found[2], expected.rstd),
        close("dX", gradients[0], wanted.x, gradients[0].dtype),
        close("dγ", gradients[1], wanted.weight),
        close("dβ", gradients[2], wanted.bias),
    ]


def max_pool(
    device: str, shape: tuple[int, ...], window: tuple[tuple[int, ...], ...], dtype: torch.dtype, is_last: bool
) -> list[Check]:
    """Compare outputs, positions and gradients; of numbers that are not finite too."""
    make, size = Inputs(device), shape[-len(window[0]) :]
    x = make.matrix(shape[0] * shape[1], shape[2] * (shape[3] if len(shape) > 3 else 1), dtype)
    x[0, :9], x[1, 2], x[1, 5] = -torch.inf, torch.nan, torch.inf
    x = x.view(shape)
    x = x.contiguous(memory_format=torch.channels_last) if is_last else x
    whole = pooling.Window(size, *window)
    output, stored = pooling.max_pool(x, whole, True)
    found = triton.max_pool(x, whole, True)
    y = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    gradient = triton.max_pool_backward(y, stored, whole, True, is_last)
    wanted = pooling.max_pool_backward(y, stored, whole, True, is_last)
    return [
        same("output", found[0].nan_to_num(7), output.nan_to_num(7)),
        same("positions", found[1], stored),
        Check("memory", float(found[0].stride() != output.stride() or gradient.stride() != x.stride()), 0.0),
        close("dX", gradient, wanted, dtype),
    ]


def cases() -> Iterator[tuple[Any, ...]]:
    """A function of this file and its arguments."""
    single = torch.float32
    # One of six is tried every time.
    yield channel_norm, (3, 1, 12, 49), 4, 3
    for bits in (2, 4, 8):
        yield channel_norm, (3, 1, 12, 49), 4, bits
        yield channel_norm, (3, 70, 40, 1), 0, bits, single, bits != 2
    yield channel_norm, (2, 70, 40, 1), 0, 3, torch.bfloat16
    for shape, groups in (
        ((2, 1, 6, 200), 6), ((2, 5, 130, 1), 26), ((2, 1, 8, 3), 2), ((2, 70, 64, 1), 8), ((1, 1, 2, 2100), 0),
        ((2, 1, 8, 128), 0),
    ):  # fmt: skip
        yield channel_norm, shape, groups, 3, single, groups != 8, groups == 0
    yield channel_norm, (2, 70, 40, 1), 0, 3, torch.float16
    for dtype in HALVES:
        yield channel_norm, (2, 1, 10, 70), 5, 3, dtype, dtype == torch.float16, True
    three = (3, 3), (2, 2), (1, 1), (1, 1)
    for is_last in (False, True):
        yield max_pool, (2, 5, 9, 11), three, single, is_last
        yield max_pool, (2, 3, 8, 10), ((2, 2), (2, 2), (0, 0), (1, 1)), torch.bfloat16, is_last
        yield max_pool, (1, 3, 9, 8), ((2, 3), (1, 2), (1, 0), (2, 3)), torch.float16, is_last
    yield max_pool, (3, 4, 37), ((3,), (2,), (1,), (1,)), single, False


def variants() -> Iterator[tuple[str, Any, str, dict[str, Any]]]:
    """Name, kernel, dtype and constants of the variants that are compiled."""
    kernels()
    module = {name: sys.modules[f"rmm_linear.kernels.{name}"] for name in ("channels", "pooling")}
    norms, pools = module["channels"], module["pooling"]
    for bits, dtype, is_first, tail in (
        (3, "*bf16", True, False), (3, "*bf16", False, False), (2, "*fp16", True, True), (4, "*fp32", True, False),
        (4, "*fp32", False, False),
    ):  # fmt: skip
        name = f"{bits} {dtype}{' first' if is_first else ''}"
        shape = {"FIRST": is_first, "BITS": bits, "B_K": 64, "TAIL": tail}
        one = {"stride": 1} if not is_first else {"stride_b": 1}
        block = 8 if is_first else 64
        tile = {"B_C": block, "B_L": 2048 // block, **one}
        yield f"channel_statistics {name}", norms._channel_statistics_kernel, dtype, tile
        given = {"COPY": not is_first, **({"p_saved": None} if is_first else {})}
        yield f"pack_channels {name}", norms._pack_channels_kernel, dtype, shape | given
        yield f"channel_sums {name}", norms._channel_sums_kernel, dtype, shape
        sums = {"FIRST": is_first, "HAS_GAMMA": True, "OF_SETS": True, "SUMS": bits == 3, "B_E": 256}
        yield f"channel_totals {name}", norms._channel_totals_kernel, dtype, sums
        yield f"channel_backward {name}", norms._channel_backward_kernel, dtype, {**shape, "HAS_GAMMA": True}
    yield "channel_moments", norms._channel_moments_kernel, "*fp32", {"B_E": 256}
    for dtype, is_last in (("*bf16", False), ("*bf16", True), ("*fp32", False)):
        shape = {"LAST": is_last, "SMALL": dtype == "*bf16", "BITS": 4, "B_E": 512}
        name = f"{dtype}{' last' if is_last else ''}"
        yield f"max_pool {name}", pools._max_pool_kernel, dtype, shape
        yield f"max_pool_backward {name}", pools._max_pool_backward_kernel, dtype, shape
