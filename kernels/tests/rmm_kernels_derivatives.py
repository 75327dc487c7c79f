"""The kernels of derivatives in few bits against plain PyTorch, and their variants to compile."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from rmm_kernels_checks import VIEWS, Check, Inputs, close, same

from rmm_linear.backends.triton import kernels
from rmm_linear.packing import derivatives as plain
from rmm_linear.packing.pointwise import FUNCTIONS, Pointwise

PARAMETERS = {"elu": (1.7,), "leaky_relu": (0.1,), "hardtanh": (-0.5, 6.0)}
NAMES = tuple(name for name in FUNCTIONS if name != "relu_squared")  # packed as any matrix


def derivative(
    device: str, name: str, bits: int, dtype: torch.dtype, columns: int, is_indexed: bool = False, view: str = ""
) -> list[Check]:
    """Compare codes, and the gradient made of them."""
    make, function = Inputs(device), Pointwise(name, PARAMETERS.get(name, ()))
    x = (4 * make.matrix(80 if view else 19, columns, torch.float32)).to(dtype)
    x[:4, 0] = torch.tensor([3.0, -3.0, 0.0, -math.inf])  # jumps, and a limit
    x, y = VIEWS[view](x) if view else x, make.matrix(19, columns, dtype)
    y = VIEWS[view](make.matrix(80, columns, dtype)) if view else y
    index = torch.tensor([3, 0, 18, 7], device=device) if is_indexed else None
    seed = None if function.is_exact else make.seed
    codes = plain.pack_derivative(x, function, bits, seed, index)
    how = (name, function.parameters, (function.range[0], function.step(bits)), bits, seed, index)
    found = torch.empty_like(codes)
    kernels().pack_derivative(x, found, *how)
    expected = plain.apply_derivative(y, codes, function, bits, seed, index)
    return [
        # Of 8 bits, a step is 2**-8 of the range: the last bits of exponentials, some 1e-6 of it, move a code in 4,000.
        same("codes", found, codes, limit=0.0 if function.is_exact else 0.005),
        close("dX", kernels().apply_derivative(y, codes, *how), expected, dtype),
    ]


def cases() -> list[tuple[Any, ...]]:
    """Arguments of :func:`derivative` that reach every function, width, dtype and view."""
    exact = ("relu", "leaky_relu", "hardtanh")
    found: list[tuple[Any, ...]] = [(name, 1 if name in exact else 4, torch.float32, 70) for name in NAMES]
    found += [("gelu", bits, torch.float32, columns, True) for bits in (1, 2, 8) for columns in (1, 130)]
    found += [("silu", 2, dtype, 70) for dtype in (torch.float16, torch.bfloat16)]
    found += [("relu", 1, dtype, 70, True) for dtype in (torch.float16, torch.bfloat16)]
    return found + [("tanh", 4, torch.float32, 80, False, view) for view in VIEWS]


def variants() -> Iterator[tuple[str, Any, str, dict[str, Any]]]:
    """Name, kernel, dtype and constants of the variants that are compiled."""
    kernels()
    module = sys.modules["rmm_linear.kernels.derivatives"]
    for name, bits, dtype, is_applied in (
        ("gelu", 4, "*bf16", True), ("gelu_tanh", 2, "*fp32", False), ("quick_gelu", 4, "*fp16", False),
        ("mish", 2, "*bf16", False), ("hardswish", 8, "*fp32", True), ("elu", 1, "*bf16", True),
        ("relu", 1, "*bf16", True), ("leaky_relu", 1, "*fp32", True), ("hardtanh", 1, "*bf16", True),
    ):  # fmt: skip
        is_exact = name in ("relu", "leaky_relu", "hardtanh")
        absent = ({} if name == "elu" else {"p_index": None}) | ({"p_seed": None} if is_exact else {})
        shape = {"FUNCTION": name, "BITS": bits, "HAS_INDEX": name == "elu", "B_K": 64, **absent}
        yield f"pack_derivative {name} {bits} {dtype}", module._pack_derivative_kernel, dtype, shape
        if is_applied:
            yield f"apply_derivative {name} {bits} {dtype}", module._apply_derivative_kernel, dtype, shape
