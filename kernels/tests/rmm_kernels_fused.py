"""Kernels that make an output in the pass that packs it: against float64, and against the kernels that pack alone."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from rmm_kernels_checks import SEED, VIEWS, Check, Inputs, same
from rmm_kernels_derivatives import PARAMETERS
from torch import Tensor

from rmm_linear.backends.triton import kernels
from rmm_linear.packing.gated import ACTIVATIONS
from rmm_linear.packing.pointwise import FUNCTIONS, Pointwise

UNIT = 2.0**-24  # half a last bit of float32, relative
EPS = 1e-5
FUSED = [Pointwise(name, PARAMETERS.get(name, ())) for name in FUNCTIONS]


def last_bits(found: Tensor, expected: Tensor, room: Tensor | float, roundings: float = 1) -> Check:
    """The largest error of an output in units of its limit.

    Args:
        found: The output.
        expected: In float64. Where it is no number or infinite, the output must be the same.
        room: What float32 may have added before the output was rounded.
        roundings: To the output's dtype, each half of its last bit; in the interpreter, which cuts float32 off to
            bfloat16, a whole one.
    """
    limits = torch.finfo(found.dtype)
    share = limits.eps * (0.5 if found.dtype != torch.bfloat16 or found.device.type != "cpu" else 1)
    limit = roundings * (share * expected.abs() + limits.smallest_normal * limits.eps) + room
    error = (found.double() - expected).abs() / limit
    largest = (limits.max < expected.abs()) | expected.isinf()
    agree = (found.double() == expected) | (found.isnan() & expected.isnan()) | (largest & found.isinf())
    return Check("output", float(error.masked_fill(agree, 0).nan_to_num(math.inf).max()) if found.numel() else 0.0, 1.0)


def _index(device: str, rows: int, is_indexed: bool) -> Tensor | None:
    return torch.arange(1, rows, 3, device=device).flip(0) if is_indexed else None


def _numbers(device: str, rows: int, columns: int, dtype: torch.dtype, view: str) -> Tensor:
    """Of every size, with what is special; the function's tails, its bend and numbers next to 0."""
    x = 4 * Inputs(device).matrix(80 if view else rows, columns, torch.float32)
    x.view(-1)[::5] *= torch.logspace(-30, 1.5, x.view(-1)[::5].numel(), device=device)
    special = torch.tensor([3.0, -3.0, 0.0, -0.0, math.inf, -math.inf, math.nan, 0.625, -0.6249, 88.0, -104.0])
    x.view(-1)[: len(special)] = special.to(device)[: x.numel()]
    return VIEWS[view](x.to(dtype)) if view else x.to(dtype)


def activated(
    device: str, name: str, bits: int, dtype: torch.dtype, columns: int, is_indexed: bool = False, view: str = ""
) -> list[Check]:
    """Compare a function's output and its codes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of NumPy, in the interpreter: −∞ · 0, which is PyTorch's NaN
        return _activated(device, Pointwise(name, PARAMETERS.get(name, ())), bits, dtype, columns, is_indexed, view)


def _activated(
    device: str, function: Pointwise, bits: int, dtype: torch.dtype, columns: int, is_indexed: bool, view: str
) -> list[Check]:
    x = _numbers(device, 19, columns, dtype, view)
    index, seed, rows = _index(device, len(x), is_indexed), Inputs(device).seed, x.shape[0]
    if function.is_bounded:
        how = (function.name, function.parameters, (function.range[0], function.step(bits)), bits, seed, index)
        shape = rows if index is None else len(index), -(-x.shape[1] * bits // 8)
        codes, found = (torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(2))
        known = x.masked_fill(x.isnan(), 0)  # a NaN replaces the seed
        kernels().pack_derivative(known, codes, *how)
        kernels().activate_and_pack(known, found, *how)
        output = kernels().activate_and_pack(x, torch.empty_like(found), *how)
        checks = [same("codes", found, codes)]
    else:
        x = x.nan_to_num(0, 100, -100)  # a range that is NaN would differ from itself
        kept = torch.relu(x if index is None else x[index])
        output, *found = kernels().square_and_pack(x, bits, seed, index)
        checks = _alike(found, kernels().pack(kept, bits, seed))
    wide = x.double()
    expected = function(wide)
    # Near 0, tanh and ELU are as near to their values as to x; far from it, they are near their limits.
    return [*checks, last_bits(output, expected, 16 * UNIT * torch.maximum(expected.abs(), wide.abs()).clamp(max=1e30))]


def normalized(
    device: str,
    bits: int,
    columns: int,
    centered: bool,
    is_indexed: bool,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    is_affine: bool = True,
    view: str = "",
) -> list[Check]:
    """Compare a norm's output, rounded before γ or not, and its packed copy; of the input, that dtype and the output.

    The mean of H numbers is off by less than depth · u of the largest, as long as depth additions lie on the way of a
    number into it; the variance by as many times its own size. Each is one part of h = (x − mean) · rstd.
    """
    make = Inputs(device)
    x = 3 * make.matrix(160 if view else 37, columns, dtypes[0]) + 2
    x = VIEWS[view](x) if view else x
    columns = x.shape[1]
    index = _index(device, len(x), is_indexed)
    gamma, beta = (make.matrix(rows, columns).view(rows, -1)[0] if is_affine else None for rows in (1, 2))
    output, *found = kernels().normalize_and_pack(x, gamma, beta, dtypes[1:], bits, make.seed, EPS, centered, index)
    checks = _alike(found, kernels().pack_norm(x, bits, make.seed, EPS, centered, index))
    wide = x.double()
    wide = wide - wide.mean(1, keepdim=True) if centered else wide
    rstd = (wide.square().mean(1, keepdim=True) + EPS).rsqrt()
    h, gamma = wide * rstd, 1.0 if gamma is None else gamma.double()
    depth = 16 + 4 * -(-columns // 256)
    of_mean = depth * x.double().abs().amax(1, keepdim=True) * rstd if centered else 0.0
    room = UNIT * (of_mean + (depth + 16) * h.abs()) * abs(gamma)
    if dtypes[1] != torch.float32:
        room = room + torch.finfo(dtypes[1]).eps * (h * gamma).abs()
    expected = h * gamma + (0.0 if beta is None else beta.double())
    room = room + 4 * UNIT * (expected.abs() + (h * gamma).abs())
    return [*checks, last_bits(output, expected, room)]


def normalized_in_one_loop(device: str, bits: int) -> list[Check]:
    """Compare the form of the kernel for NVIDIA, which the interpreter would not take."""
    module = sys.modules[f"{kernels().__name__}.norms"]
    with mock.patch.object(module, "is_ieee", return_value=False):
        return normalized(device, bits, 130, True, True, (torch.float32, torch.float32, torch.float32))


def gated(
    device: str, activation: str, bits: int, shape: tuple[int, int], dtype: torch.dtype, is_indexed: bool
) -> list[Check]:
    """Compare act(a) · b and both packed products, and one without the other."""
    make, seeds = Inputs(device), torch.tensor([SEED, SEED + 1], device=device)
    a, b = (2 * make.matrix(shape[0], 2 * shape[1], torch.float32)).to(dtype).chunk(2, dim=1)
    index, checks = _index(device, shape[0], is_indexed), []
    for wanted in ((True, True), (True, False), (False, True)):
        output, found = kernels().gate_and_pack(a, b, seeds, activation, bits, wanted, index)
        expected = kernels().pack_gated(a, b, seeds, activation, bits, wanted, index)
        assert [one is None for one in found] == [one is None for one in expected]
        for one, other in zip(found, expected, strict=True):
            checks += [] if one is None else _alike(one, other)
        value = Pointwise(activation)(a.double())
        room = 16 * UNIT * torch.maximum(a.double().abs(), value.abs()) * b.double().abs()
        # Of act(a), which is rounded before it is multiplied, the smallest numbers have fewer bits.
        tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * b.double().abs()
        checks.append(last_bits(output, value * b.double(), room + tiny, roundings=2.01))
    return checks


def _alike(found: Any, expected: Any) -> list[Check]:
    """What is packed has the same bits: NaN is different from itself, and poisoned outputs are NaN."""
    return [same(f"part {place}", one, other) for place, (one, other) in enumerate(zip(found, expected, strict=True))]


def cases() -> Iterator[tuple[Any, ...]]:
    """A function of this file and its arguments."""
    half = (torch.float16, torch.bfloat16)
    for function in FUSED:
        bits = function.bits(4)
        yield activated, function.name, bits, torch.float32, 70
        for dtype in half:
            yield activated, function.name, bits, dtype, 130, True
    for bits in (1, 2, 8):
        for columns in (1, 64, 130):
            yield activated, "gelu", bits, torch.float32, columns, True
    for view in VIEWS:
        yield activated, "tanh", 4, torch.float32, 80, True, view
        yield normalized, 2, 80, True, True, (torch.float32,) * 3, True, view
    for bits in (8, 4, 2):
        for columns, centered, is_indexed in (
            (64, True, False),
            (130, False, True),
            (5, True, True),
            (300, True, False),
        ):
            yield normalized, bits, columns, centered, is_indexed, (torch.float32,) * 3
    yield normalized_in_one_loop, 2
    for dtype in half:
        yield normalized, 2, 70, True, True, (dtype, torch.float32, dtype)
        yield normalized, 2, 70, False, False, (dtype, dtype, dtype)
        yield normalized, 2, 70, False, False, (dtype, torch.float32, torch.float32), False
    for activation in ACTIVATIONS:
        yield gated, activation, 4, (37, 130), torch.float32, activation == "silu"
    for bits, dtype in ((8, torch.float16), (2, torch.bfloat16)):
        yield gated, "silu", bits, (37, 70), dtype, True
        yield gated, "gelu", bits, (18, 5), dtype, False


def variants() -> Iterator[tuple[str, Any, str, dict[str, Any]]]:
    """Name, kernel, dtype and constants of the variants that are compiled."""
    kernels()
    module = {name: sys.modules[f"rmm_linear.kernels.{name}"] for name in ("activate", "norms", "gated")}
    for name, bits, dtype, is_indexed in (
        ("gelu", 4, "*bf16", True), ("gelu", 2, "*fp32", False), ("gelu_tanh", 2, "*fp32", False),
        ("silu", 4, "*bf16", False), ("quick_gelu", 4, "*fp16", False), ("mish", 2, "*bf16", False),
        ("hardswish", 8, "*fp32", False), ("sigmoid", 4, "*bf16", False), ("tanh", 4, "*bf16", False),
        ("elu", 1, "*bf16", False), ("relu", 1, "*bf16", True), ("leaky_relu", 1, "*fp32", False),
        ("hardtanh", 1, "*bf16", False),
    ):  # fmt: skip
        absent = {} if is_indexed else {"p_place": None}
        absent |= {"p_seed": None} if name.endswith(("relu", "hardtanh")) else {}
        shape = {"FUNCTION": name, "BITS": bits, "HAS_PLACE": is_indexed, "B_K": 64, **absent}
        yield f"activate {name} {bits} {dtype}", module["activate"]._activate_kernel, dtype, shape
    for bits, dtype in ((4, "*bf16"), (2, "*fp32"), (8, "*fp16")):
        absent = {"HAS_PLACE": True} if bits == 8 else {"HAS_PLACE": False, "p_place": None}
        yield f"square {bits} {dtype}", module["activate"]._square_kernel, dtype, {"BITS": bits, "B_K": 64, **absent}
    for bits, dtype, centered, is_indexed, before in (
        (2, "*bf16", True, True, None), (2, "*bf16", False, False, tl.bfloat16), (4, "*fp32", True, False, None),
        (8, "*fp16", False, False, tl.float16),
    ):  # fmt: skip
        shape = {
            "CENTERED": centered,
            "BITS": bits,
            "B_K": 64,
            "ROUND": before,
            "HAS_GAMMA": True,
            "HAS_BETA": centered,
        }
        shape |= {"HAS_PLACE": True} if is_indexed else {"HAS_PLACE": False, "p_place": None}
        shape |= {} if centered else {"p_mean": None, "p_beta": None}
        yield f"normalize {bits} {dtype} {centered}", module["norms"]._normalize_kernel, dtype, shape
    for activation, bits, dtype in (
        (0, 4, "*bf16"), (1, 8, "*fp32"), (2, 4, "*bf16"), (2, 2, "*fp16"), (3, 4, "*fp32")
    ):  # fmt: skip
        shape = {"ACTIVATION": activation, "BITS": bits, "HAS_P": True, "HAS_S": True, "B_K": 64}
        shape |= {"HAS_PLACE": True} if bits == 2 else {"HAS_PLACE": False, "p_place": None}
        yield f"gate {activation} {bits} {dtype}", module["gated"]._gate_kernel, dtype, shape
