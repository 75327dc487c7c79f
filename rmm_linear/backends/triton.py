"""Import the Triton kernels, from a checkout of the repository or installed as ``rmm_linear.kernels``, and try them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import re
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch.utils._python_dispatch import _disable_current_modes

from rmm_linear.sketches.seeds import is_capturing

logger = logging.getLogger(__name__)

KINDS = ("countsketch", "rows", "gaussian", "rademacher", "hadamard")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_OLDEST_TRITON = (3, 4)
_NAME = "rmm_linear.kernels"
_CHECKOUT = Path(__file__).resolve().parents[2] / "kernels" / "torch-ext" / "rmm_kernels"
_REMEDY = (
    "Triton compiles its launcher in C the first time: install gcc or clang (or set CC) and the headers of Python "
    "(python3-dev), and start again."
)
_failures: dict[str, str | None] = {}  # of the first launch, by type of device; None where it succeeded


@functools.cache
def is_installed() -> bool:
    """Say whether a Triton is installed that compiles all kernels; 3.2 and 3.3 do not."""
    if importlib.util.find_spec("triton") is None:
        return False
    found = re.match(r"(\d+)\.(\d+)", importlib.import_module("triton").__version__)
    return found is not None and (int(found[1]), int(found[2])) >= _OLDEST_TRITON


@functools.cache
def kernels() -> ModuleType:
    """Import the module of the kernels: from a checkout, or as installed."""
    if importlib.util.find_spec(_NAME) is not None or not _CHECKOUT.is_dir():
        return importlib.import_module(_NAME)
    spec = importlib.util.spec_from_file_location(
        _NAME, _CHECKOUT / "__init__.py", submodule_search_locations=[str(_CHECKOUT)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"The kernels in {_CHECKOUT} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_NAME]
        raise
    return module


def failure(device: str) -> str | None:
    """Say why kernels cannot be launched on a type of device, and None if they can, or cannot be tried yet.

    The first call launches one; a warning then says once that plain PyTorch is used instead.
    """
    if device not in _failures and _can_launch(device):
        _failures[device] = _launch(device)
        if _failures[device] is not None:
            logger.warning(
                "Triton's kernels do not start on %s, so plain PyTorch does their work: same results, slower steps. %s",
                device,
                _failures[device],
            )
    return _failures.get(device)


def was_tried(device: str) -> bool:
    """Say whether it is known that kernels can be launched on a type of device, or cannot."""
    return device in _failures


def _launch(device: str) -> str | None:
    """Launch a kernel, on a device that is in use: the current one may be another process's."""
    count = torch.cuda.device_count() if device == "cuda" else 0
    used = [index for index in range(count) if torch._C._cuda_hasPrimaryContext(index)]  # pyright: ignore[reportAttributeAccessIssue]
    with _disable_current_modes():
        seed = torch.zeros(1, dtype=torch.int64, device=torch.device(device, used[0]) if used else device)
        try:
            kernels().random_keys(seed, 1)
        except Exception as error:
            reason = (str(error).splitlines() or ["no message"])[0].rstrip(".")
            return f"{type(error).__name__}: {reason}. {_REMEDY}"
    return None


def _can_launch(device: str) -> bool:
    """Say whether tensors have memory of their own now, and no CUDA graph records what is launched."""
    is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return not is_fake and getattr(torch, device).is_available() and not is_capturing(torch.device(device))
