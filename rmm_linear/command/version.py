"""``rmm-linear version``: what a bug report needs to know of a machine."""

from __future__ import annotations

import os
import platform

import torch

from rmm_linear._support.provenance import machine, versions
from rmm_linear._version import __version__
from rmm_linear.backends import native, triton
from rmm_linear.backends.native.library import MISSING
from rmm_linear.backends.select import requested_backend

_PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "trl", "datasets", "numpy")


def version() -> str:
    """Describe the versions and backends of this machine.

    Returns:
        Lines of a name and its value.
    """
    lines = {"rmm_linear": __version__, **versions(*_PACKAGES)}
    lines["system"] = f"{platform.system()} {platform.release()}, {machine()}, {torch.get_num_threads()} threads"
    lines["CPU backend"] = "C library" if native.is_available() else f"plain PyTorch. {MISSING}"
    lines["GPU backend"] = "Triton kernels" if triton.is_installed() else "plain PyTorch: Triton is not installed"
    lines["GPU"] = ", ".join(_devices()) or "none"
    lines["RMM_BACKEND"] = requested_backend() + ("" if "RMM_BACKEND" in os.environ else " (not set)")
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def _devices() -> list[str]:
    found = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return found + [torch.xpu.get_device_name(index) for index in range(torch.xpu.device_count())]
