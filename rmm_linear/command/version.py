"""``rmm-linear version``: describe a machine for a bug report."""

from __future__ import annotations

import os
import platform
from logging.handlers import BufferingHandler

import torch

from rmm_linear._support.provenance import machine, versions
from rmm_linear._version import __version__
from rmm_linear.backends import native, triton
from rmm_linear.backends.native import library
from rmm_linear.backends.select import ACCELERATORS, requested_backend

_LEVELS = {4: "for AVX-512", 3: "for AVX2", 0: "for any processor"}
_PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "trl", "datasets", "numpy")


def version() -> str:
    """Describe the versions and backends of this machine."""
    lines = {"rmm_linear": __version__, **versions(*_PACKAGES)}
    lines["system"] = f"{platform.system()} {platform.release()}, {machine()}, {torch.get_num_threads()} threads"
    lines["CPU backend"] = _cpu_backend()
    lines["GPU backend"] = _gpu_backend()
    lines["GPU"] = ", ".join(_devices()) or "none"
    lines["RMM_BACKEND"] = requested_backend() + ("" if "RMM_BACKEND" in os.environ else " (not set)")
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def _cpu_backend() -> str:
    """Describe what runs on CPU; a missing library's warning is a part of it, and is not logged."""
    said = BufferingHandler(capacity=100)
    propagate = library.logger.propagate
    library.logger.addHandler(said)
    library.logger.propagate = False
    try:
        if native.is_available():
            return f"C library, {_LEVELS[library.level()]}"
    finally:
        library.logger.propagate = propagate
        library.logger.removeHandler(said)
    return f"plain PyTorch. {said.buffer[0].getMessage() if said.buffer else library.MISSING}"


def _gpu_backend() -> str:
    if not triton.is_installed():
        return "plain PyTorch: Triton is not installed"
    failures = [triton.failure(device) for device in ACCELERATORS if getattr(torch, device).is_available()]
    return next((f"plain PyTorch. {failure}" for failure in failures if failure is not None), "Triton kernels")


def _devices() -> list[str]:
    found = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return found + [torch.xpu.get_device_name(index) for index in range(torch.xpu.device_count())]
