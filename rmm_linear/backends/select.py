"""Choose the implementation for a tensor: plain PyTorch, the C library on CPU, or the Triton kernels."""

from __future__ import annotations

import os
from typing import Literal

import torch

from rmm_linear.backends import native, triton

BACKENDS = ("auto", "torch", "triton")
Backend = Literal["plain", "native", "triton"]
VARIABLE = "RMM_BACKEND"
# What os.environ.get looks into: it alone takes half a microsecond.
ENVIRONMENT = getattr(os.environ, "_data", os.environ)
SETTING = VARIABLE if ENVIRONMENT is os.environ else os.environ.encodekey(VARIABLE)
ACCELERATORS = ("cuda", "xpu")  # ROCm calls itself cuda


def requested_backend() -> str:
    """Read the environment variable RMM_BACKEND."""
    name = os.environ.get(VARIABLE, "auto")
    if name not in BACKENDS:
        raise ValueError(f"{VARIABLE} must be {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}, got {name!r}.")
    return name


def backends_of(device: str) -> tuple[Backend, ...]:
    """Return the implementations for a type of device by RMM_BACKEND, the preferred one first and "plain" last."""
    requested = requested_backend()
    if requested == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "RMM_BACKEND=triton runs on CPU in Triton's interpreter only, and TRITON_INTERPRET=1 is not set. "
            "Set it before Python starts, or use RMM_BACKEND=auto."
        )
    if requested == "torch":
        return ("plain",)
    is_tried = device in ACCELERATORS and triton.is_installed()
    failure = triton.failure(device) if is_tried else None
    if requested == "triton" and failure is not None:
        raise RuntimeError(
            f"RMM_BACKEND=triton needs kernels that can be launched on {device}, got {failure} Or use RMM_BACKEND=auto."
        )
    has_kernels = requested == "triton" or (is_tried and failure is None)
    has_library = device == "cpu" and native.is_available()
    return (*(("triton",) if has_kernels else ()), *(("native",) if has_library else ()), "plain")


def backend_of(device: str, dtype: torch.dtype) -> Backend:
    """Choose the implementation by device, dtype and RMM_BACKEND."""
    first, *others = backends_of(device)
    is_supported = dtype in triton.DTYPES or not dtype.is_floating_point
    return others[0] if first == "triton" and not is_supported else first
